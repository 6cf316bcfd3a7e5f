"""Writes helm/etude/README.md from the chart's values: `python hack/chart_readme.py`."""

import runpy
import subprocess
import sys
from pathlib import Path

CHART = Path("helm") / "etude"
PAGE = CHART / "README.md"
LIMIT_S = 60
"""A tenth of a second when nothing else runs."""


def program(root: Path) -> Path:
    """The helm-docs that the testbed is built with; it may not be there."""
    folder: Path = runpy.run_path(str(root / "hack" / "testbed" / "build.py"))["folder"]()
    return folder / "helm-docs"


def page(root: Path) -> str:
    """The page as Markdown.

    Raises:
        CalledProcessError: helm-docs cannot read the chart.
    """
    words = (str(program(root)), "--chart-search-root", str(root / CHART), "--dry-run")
    done = subprocess.run(
        (*words, "--sort-values-order", "file"),
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.stdout.rstrip("\n") + "\n"


if __name__ == "__main__":
    if not program(Path()).exists():
        sys.exit("there is no helm-docs: `python hack/testbed/build.py` builds it")
    PAGE.write_text(page(Path()), encoding="utf-8")
