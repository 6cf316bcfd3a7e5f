"""An imported row in the real sandbox, with real pytest: the gold patch scores 1, no patch 0."""

import asyncio
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from tests.support import needs
from tests.support.environments import swebench_rows

from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.tasks import lint, verify
from etude.envserver.tasks.formats import command

_RUNNER = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_COMMAND = "PYTHONPATH=/tests/lib python3 -m pytest -rA -p no:cacheprovider"


def _with_runner(folder: Path) -> None:
    """Put pytest where the sandbox sees it: an image would hold it."""
    for name in _RUNNER:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(
            Path(spec.origin).parent,
            folder / "tests" / "lib" / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )


@pytest.fixture
def task(tmp_path: Path) -> Path:
    row = swebench_rows.made(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    words = ("swebench", str(rows), "--repositories", str(tmp_path / "mirrors"))
    out = tmp_path / "tasks"
    assert command.main([*words, "--out", str(out), "--test-command", _COMMAND]) == 0
    _with_runner(out / "us__shop-1")
    return out / "us__shop-1"


def _verified(folder: Path) -> verify.TaskProof:
    try:
        return asyncio.run(verify.verify_tasks([folder]))[0]
    except DriverUnavailableError as error:
        if needs.is_required("sandbox", "qemu"):
            raise
        pytest.skip(str(error))


def test_the_gold_patch_solves_the_row_and_no_patch_does_not(task: Path) -> None:
    found = _verified(task)
    assert found.findings == ()
    assert (found.nothing, found.solution) == (0.0, 1.0)


def test_the_task_gives_nothing_away(task: Path) -> None:
    _verified(task)
    assert asyncio.run(lint.lint_tasks([task]))[0].findings == ()


@pytest.mark.parametrize(
    ("files", "solution"),
    [
        pytest.param(
            {
                "shop.py": "def total(values):\n    return 3\n",
                "conftest.py": "import os\nos._exit(1)",
            },
            None,
            id="a runner that is ended",
        ),
        pytest.param(
            {
                "conftest.py": (
                    "import contextlib, os\n"
                    "for n in range(1, 20):  # all descriptors\n"
                    "    with contextlib.suppress(OSError):\n"
                    "        os.write(n, b'PASSED tests/test_shop.py::test_sums\\nPASSED'\n"
                    "            b' tests/test_shop.py::test_leaves_out_what_is_missing\\n')\n"
                    "os._exit(1)\n"
                )
            },
            0.0,
            id="results that the runner did not find",
        ),
        pytest.param(
            {"tests/test_shop.py": "def test_sums(): pass\n"}, 0.0, id="tests of the agent's own"
        ),
    ],
)
def test_what_repairs_nothing_does_not_score(
    files: dict[str, str], solution: float | None, task: Path
) -> None:
    shutil.rmtree(task / "solution" / "files")
    for path, text in files.items():
        target = task / "solution" / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    assert _verified(task).solution == solution
