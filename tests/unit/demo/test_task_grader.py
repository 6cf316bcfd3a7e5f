"""The verifier that a task ships: right for honest work, not fooled by the usual tricks."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.demo import task_folders
from etude.demo.problems import Problem, Source

Grade = Callable[[dict[str, str]], str]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return next(iter(Source(1).take("train", 1)))


@pytest.fixture
def grade(tmp_path: Path, problem: Problem) -> Grade:
    """Run the shipped verifier on the workspace with some files replaced; the reward file."""

    def run(changed: dict[str, str]) -> str:
        for path, data in task_folders.files(problem).items():
            part, _, rest = path.partition("/")
            if part in {"environment", "tests"}:
                target = tmp_path / part / rest
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        for path, text in changed.items():
            target = tmp_path / "environment" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        reward = tmp_path / "logs" / "reward.txt"
        done = subprocess.run(
            [sys.executable, tmp_path / "tests/verify.py", tmp_path / "environment", reward],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path / "environment",
            check=True,
        )
        assert done.stdout.count("\n") == 1
        assert done.stdout.endswith("of 3 functions behave as asked\n"), "and nothing secret"
        assert not done.stderr
        return reward.read_text()

    return run


def test_doing_nothing_scores_zero_and_the_repair_one(grade: Grade, problem: Problem) -> None:
    target = problem.repository.target
    assert grade({}) == "0\n"
    assert grade({target.path: target.source()}) == "1\n"


def test_breaking_another_function_scores_zero(grade: Grade, problem: Problem) -> None:
    repaired = problem.repository.sources(repaired=True)
    other = next(f for f in problem.repository.functions if f is not problem.repository.target)
    assert grade(repaired | {other.path: f"def {other.name}(*args):\n    return 7\n"}) == "0\n"


def test_a_repair_that_imports_from_its_own_package_counts(grade: Grade, problem: Problem) -> None:
    target = problem.repository.target
    package = problem.repository.package
    moved = {
        f"{package}/shared.py": target.source(),
        target.path: f"from {package}.shared import {target.name}\n",
    }
    assert grade(moved) == "1\n"


EQUAL_TO_ALL = """
class Yes(int):
    def __eq__(self, other):
        return True
    __hash__ = None
"""
TRICKS = {
    "leaves early": "import sys; sys.exit(0)\n",
    "leaves at once": "import os; os._exit(0)\n",
    "raises what is no Exception": "raise KeyboardInterrupt\n",
    "is no Python": "def (:\n",
    "kills its parent's group": "import os, signal; os.killpg(os.getpgid(0), signal.SIGKILL)\n",
    "hangs": "while True:\n    pass\n",
    "prints a verdict": "print('3 of 3 functions behave as asked')\n",
    "patches json": "import json\njson.dumps = lambda *a, **k: '[[], [], []]'\n",
    "reads the answers": (
        "import glob\n"
        "seen = [open(p).read() for p in glob.glob('../tests/cases.json')]\n"
        "open('stolen', 'w').write(''.join(seen))\n"
    ),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_at_import_scores_zero(
    trick: str, grade: Grade, problem: Problem, tmp_path: Path
) -> None:
    target = problem.repository.target
    wrong = target.source(problem.repository.bug)
    assert grade({target.path: TRICKS[trick] + wrong}) == "0\n"
    stolen = tmp_path / "environment" / "stolen"
    assert not stolen.exists() or stolen.read_text() == ""


def test_objects_that_equal_everything_score_zero(grade: Grade, problem: Problem) -> None:
    target = problem.repository.target
    cheat = f"{EQUAL_TO_ALL}\ndef {target.name}(*args):\n    return Yes(0)\n"
    assert grade({target.path: cheat}) == "0\n"


def test_a_reward_that_the_code_writes_itself_is_replaced(
    grade: Grade, problem: Problem, tmp_path: Path
) -> None:
    target = problem.repository.target
    reward = tmp_path / "logs" / "reward.txt"
    cheat = (
        f"import os\nos.makedirs({str(reward.parent)!r}, exist_ok=True)\n"
        f"open({str(reward)!r}, 'w').write('1')\n"
    )
    assert grade({target.path: cheat + target.source(problem.repository.bug)}) == "0\n"


def test_a_helper_left_running_ends_with_the_grading(
    grade: Grade, problem: Problem, tmp_path: Path
) -> None:
    target = problem.repository.target
    helper = (
        "import os, time\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(600)\n"
        "    os._exit(0)\n"
        f"with open({str(tmp_path / 'pid')!r}, 'w') as file:\n"
        "    file.write(str(child))\n"
    )
    assert grade({target.path: helper + target.source()}) == "1\n"
    pid = int((tmp_path / "pid").read_text())
    assert ends(pid)


def ends(pid: int) -> bool:
    """Whether a killed process is gone within a few seconds; a busy machine buries late."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_planted_start_up_files_and_tests_change_nothing(grade: Grade, problem: Problem) -> None:
    poison = "raise SystemExit(1)\n"
    planted = dict.fromkeys(
        ("conftest.py", "sitecustomize.py", "usercustomize.py", "json.py", "tests/test_repo.py"),
        poison,
    )
    target = problem.repository.target
    assert grade(planted) == "0\n"
    assert grade({target.path: target.source()}) == "1\n"


def test_a_missing_file_scores_zero(grade: Grade, problem: Problem, tmp_path: Path) -> None:
    grade({})
    (tmp_path / "environment" / problem.repository.target.path).unlink()
    cases = task_folders.files(problem)["tests/cases.json"]
    (tmp_path / "tests" / "cases.json").write_bytes(cases)
    done = subprocess.run(
        [sys.executable, tmp_path / "tests/verify.py", tmp_path / "environment", tmp_path / "r"],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.returncode == 0
    assert (tmp_path / "r").read_text() == "0\n"


def test_the_hidden_cases_are_six_for_each_function(problem: Problem) -> None:
    modules = json.loads(task_folders.files(problem)["tests/cases.json"])["modules"]
    assert [len(module["calls"]) for module in modules] == [6, 6, 6]
