"""Verifying tasks in the real sandbox: proved ones, and each way not to be."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import needs

from etude.demo import task_folders
from etude.demo.problems import Source
from etude.demo.sessions import task_folders as session_folders
from etude.demo.sessions.tasks import SessionSource
from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.tasks import verify

Spoil = Callable[[Path], None]


@pytest.fixture
def task_set(tmp_path: Path) -> Path:
    for index, problem in enumerate(Source(21).take("train", 3)):
        task_folders.write(problem, tmp_path / "tasks" / f"train-{index}")
    return tmp_path / "tasks"


def _verified(folder: Path) -> verify.TaskProof:
    try:
        return asyncio.run(verify.verify_tasks([folder]))[0]
    except DriverUnavailableError as error:
        if needs.is_required("sandbox", "qemu"):
            raise
        pytest.skip(str(error))


def test_generated_tasks_are_proved(task_set: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _verified(task_set / "train-0")
    assert verify.main([str(task_set)]) == 0
    *rows, summary = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        ["task", "nothing", "solution"],
        *([f"train-{index}", "0", "1", "proved"] for index in range(3)),
    ]
    assert summary == "3 of 3 tasks: solution 1, doing nothing 0"
    assert verify.main([str(task_set / "train-1")]) == 0


def test_generated_sessions_are_proved(tmp_path: Path) -> None:
    for index, task in enumerate(SessionSource(21).take("train", 2)):
        session_folders.write(task, tmp_path / f"session-{index}")
        found = _verified(tmp_path / f"session-{index}")
        assert (found.nothing, found.solution, found.findings) == (0.0, 1.0, ())


def test_each_step_is_proved_on_what_the_steps_before_it_left(tmp_path: Path) -> None:
    """Solutions of all steps score 1; without them the second test finds no cake."""
    folder = tmp_path / "cake"
    grade = 'if {}; then r=1; else r=0; fi; echo "$r" > /logs/verifier/reward.txt\n'
    for path, text in {
        "task.toml": "[[steps]]\nname = 'bake'\n[[steps]]\nname = 'ice'\n",
        "instruction.md": "Bake a cake, and ice it.\n",
        "environment/oven.txt": "hot\n",
        "steps/bake/instruction.md": "Bake a cake.\n",
        "steps/bake/tests/test.sh": grade.format('[ "$(cat cake.txt)" = cake ]'),
        "steps/bake/solution/solve.sh": "echo cake > cake.txt\n",
        "steps/ice/instruction.md": "Ice it.\n",
        "steps/ice/workdir/setup.sh": "echo sugar > sugar.txt\n",
        "steps/ice/tests/test.sh": grade.format('[ "$(cat cake.txt)" = "cake sugar" ]'),
        "steps/ice/solution/solve.sh": 'echo "$(cat cake.txt) $(cat sugar.txt)" > cake.txt\n',
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    found = _verified(folder)
    assert (found.nothing, found.solution, found.findings) == (0.0, 1.0, ())
    (folder / "steps/ice/workdir/setup.sh").write_text("exit 3\n")
    assert "step ice: no reward file, exit code 3" in _verified(folder).findings[0]


def _replaced(path: str, text: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / path).write_text(text)

    return spoil


SPOILT = {
    "a solution that repairs nothing": (
        _replaced("solution/solve.sh", "true\n"),
        "its solution scores 0, not 1",
    ),
    "a solution that fails": (
        _replaced("solution/solve.sh", "exit 3\n"),
        "its solution: no reward file, exit code 3",
    ),
    "a verifier that always passes": (
        _replaced("tests/verify.py", "open('/logs/verifier/reward.txt', 'w').write('1')\n"),
        "doing nothing",
    ),
    "a verifier without a number": (
        _replaced(
            "tests/verify.py",
            "import os\nos.makedirs('/logs/verifier', exist_ok=True)\n"
            "open('/logs/verifier/reward.txt', 'w').write('nan')\n",
        ),
        "doing nothing: the reward file holds no number: 'nan'",
    ),
    "a verifier that crashes": (
        _replaced("tests/verify.py", "raise RuntimeError('broken')\n"),
        "doing nothing: no reward file, exit code 1",
    ),
    "a verifier that hangs": (
        _replaced(
            "task.toml", "[verifier]\ntimeout_sec = 1.0\n[metadata]\netude_verifier = 'sleep 60'\n"
        ),
        "doing nothing: the verifier did not end within 1 s",
    ),
    "a key that nothing reads": (
        _replaced("task.toml", "speed = 1\n"),
        "key speed is not known",
    ),
    "a folder that is no task": (
        _replaced("instruction.md", ""),
        "instruction.md  is empty",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_task_that_cannot_be_trusted_is_found_out(case: str, task_set: Path) -> None:
    spoil, message = SPOILT[case]
    spoil(task_set / "train-0")
    found = _verified(task_set / "train-0")
    assert any(message in finding for finding in found.findings), found


def test_a_folder_without_tasks_is_an_error(tmp_path: Path) -> None:
    assert verify.main([str(tmp_path)]) == 4
