"""Linting tasks from inside of the real sandbox: clean ones, and what gives one away."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import needs

from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.tasks import lint

ROOT = Path(__file__).parents[3]
Spoil = Callable[[Path], object]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples" / "tasks" / "rename-columns", tmp_path / "task")
    return tmp_path / "task"


def _looked(folder: Path) -> lint.LintResult:
    try:
        return asyncio.run(lint.lint_tasks([folder]))[0]
    except DriverUnavailableError as error:
        if needs.is_required("sandbox", "qemu"):
            raise
        pytest.skip(str(error))


def test_the_example_is_clean(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _looked(task).findings == ()
    assert lint.main([str(task)]) == 0
    assert capsys.readouterr().out == "1 of 1 tasks are clean (3 files compared)\n"


def _repository(folder: Path) -> None:
    environment = folder / "environment"
    for words in (
        ("init", "-q", "-b", "main"),
        ("add", "table"),
        ("commit", "-q", "-m", "all"),
        ("tag", "fixed"),
    ):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
            cwd=environment,
            check=True,
        )
    shutil.rmtree(environment / ".git" / "hooks")


def _appended(path: str, text: str) -> Spoil:
    def append(folder: Path) -> None:
        with (folder / path).open("a") as file:
            file.write(text)

    return append


def _copied(source: str, target: str) -> Spoil:
    def copy(folder: Path) -> None:
        shutil.copy(folder / source, folder / target)

    return copy


def _in_the_image(folder: Path) -> None:
    text = json.dumps((folder / "tests" / "check.py").read_text())
    (folder / "image.yaml").write_text(f"name: a\nfiles: [{{path: /opt/check.py, text: {text}}}]\n")


SPOILT: dict[str, tuple[Spoil, str, str]] = {
    "history": (_repository, "refs", "environment/.git"),
    "a hidden test in the workspace": (
        _copied("tests/check.py", "environment/table/check.py"),
        "hidden-file",
        "environment/table/check.py",
    ),
    "the solution in the workspace": (
        _copied("solution/reader.py", "environment/table/.reader.py.swp"),
        "hidden-file",
        "environment/table/.reader.py.swp",
    ),
    "a hidden test in the image": (_in_the_image, "hidden-file", "image.yaml: 0"),
    "a network": (
        _appended("tests/test.sh", "\napt-get -y install curl\n"),
        "network",
        "tests/test.sh line 9",
    ),
    "a network for the solution": (
        _appended("solution/solve.sh", "curl -LsSf https://example.org/install.sh | sh\n"),
        "network",
        "solution/solve.sh line 11",
    ),
    "no task": (lambda f: (f / "task.toml").unlink(), "unreadable", "task"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_gives_a_task_away_is_said_with_its_place(case: str, task: Path) -> None:
    spoil, rule, where = SPOILT[case]
    spoil(task)
    found = _looked(task).findings
    assert (rule, where) in {(each.rule, each.where) for each in found}, found


def test_findings_are_printed_for_people_and_for_programs(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (task / "environment" / "table" / "\u202ecopy").write_bytes(
        (task / "tests" / "check.py").read_bytes()
    )
    _looked(task)
    # A name that turns a terminal's text around is no name that a task may have.
    assert lint.main([str(task), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["task_id"] == "task"
    assert shown["findings"][0]["rule"] == "unreadable"
    assert lint.main([str(task)]) == 1
    assert "\u202e" not in capsys.readouterr().out
