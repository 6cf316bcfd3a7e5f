"""`etude lint`: the API server's verdict, offline."""

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.output import Exit, say
from etude.common.errors import Problem, UserError


def lint(
    files: Annotated[list[Path], typer.Argument(help="Manifests: RLRun, EnvPool or Checkpoint.")],
) -> None:
    """Check manifests without a cluster: file, line, field, reason and fix for each problem."""
    from etude.common.api.lint.linter import lint_file

    found = 0
    for path in files:
        if not path.is_file():
            raise UserError(_no_file(path))
        for finding in lint_file(path):
            found += 1
            say(finding.text())
    if found:
        say(f"{found} problem{'s' if found > 1 else ''}")
        raise SystemExit(Exit.INVALID)
    say(f"{len(files)} file{'s' if len(files) > 1 else ''} checked, nothing to fix")


def _no_file(path: Path) -> Problem:
    if path.is_dir():
        what, fix = "this is a folder", f"name its files: etude lint {path / '*.yaml'}"
        return Problem("NotFound", what=what, where=str(path), fix=fix)
    return Problem("NotFound", what="no such file", where=str(path), fix="check the path")
