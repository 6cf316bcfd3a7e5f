"""Logs of pytest read as the benchmark reads them, and what counts as solved."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from etude.envserver.tasks.formats import swebench_grader
from etude.envserver.tasks.formats.swebench_grader import is_solved, statuses

SUMMARY = """\
tests/test_a.py .F.s
=================================== FAILURES ===================================
E       AssertionError: PASSED is a word here
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_many[a - b c]
SKIPPED [1] tests/test_a.py:9: no reason
XFAIL tests/test_a.py::test_known - a known bug
XPASS tests/test_a.py::test_luck
FAILED tests/test_a.py::test_two - assert 1 == 2
FAILED tests/test_a.py::test_two[x - y] - assert 'a - b' == 'c'
ERROR tests/test_b.py - ImportError: no module
========================= 2 failed, 2 passed in 0.01s ==========================
"""


def test_the_summary_tells_of_every_test() -> None:
    assert statuses(SUMMARY) == {
        "tests/test_a.py::test_one": "PASSED",
        "tests/test_a.py::test_many[a - b c]": "PASSED",
        "tests/test_a.py::test_known": "XFAIL",
        "tests/test_a.py::test_luck": "XPASS",
        "tests/test_a.py::test_two": "FAILED",
        "tests/test_a.py::test_two[x - y]": "FAILED",
        "tests/test_b.py": "ERROR",
    }


def test_verbose_lines_and_colours_are_read_too() -> None:
    log = (
        "tests/test_a.py::test_one \x1b[32mPASSED\x1b[0m     [ 50%]\r\n"
        "tests/test_a.py::test_two[a b] FAILED [100%]\n"
        "\x1b[31mFAILED\x1b[0m tests/test_a.py::test_two[a b] - boom\n"
    )
    assert statuses(log) == {
        "tests/test_a.py::test_one": "PASSED",
        "tests/test_a.py::test_two[a b]": "FAILED",
    }


@pytest.mark.parametrize("log", ["", "PASSED", "\0\xff", "PASSED \n FAILED ", "no PASSEDx here"])
def test_what_is_no_result_is_none(log: str) -> None:
    assert statuses(log) == {}


def test_a_name_that_was_cut_stands_for_tests_that_agree() -> None:
    found = {"t::a[x y]": "PASSED", "t::a[x z]": "PASSED", "t::b[1]": "PASSED", "t::b[2]": "FAILED"}
    assert swebench_grader.status("t::a[x", found) == "PASSED"
    assert swebench_grader.status("t::b[", found) == ""
    assert swebench_grader.status("t::a", found) == ""


@pytest.mark.parametrize(
    ("repaired", "kept", "exit_code", "solved"),
    [
        ("PASSED", "PASSED", 0, True),
        ("XFAIL", "XFAIL", 0, True),
        ("PASSED", "SKIPPED", 0, True),
        ("SKIPPED", "PASSED", 0, False),
        ("XPASS", "PASSED", 0, False),
        ("FAILED", "PASSED", 1, False),
        ("PASSED", "FAILED", 1, False),
        ("ERROR", "PASSED", 1, False),
        (None, "PASSED", 0, False),
        ("PASSED", None, 0, False),
        # The log says that all is well, the runner does not: somebody else wrote the log.
        ("PASSED", "PASSED", 1, False),
        ("PASSED", "PASSED", -9, False),
    ],
)
def test_solved_means_repaired_and_nothing_else_broken(
    repaired: str | None, kept: str | None, exit_code: int, *, solved: bool
) -> None:
    given = {"t::new": repaired, "t::old": kept}
    found = {name: status for name, status in given.items() if status is not None}
    assert solved is is_solved(
        found, fail_to_pass=["t::new"], pass_to_pass=["t::old"], exit_code=exit_code
    )


def test_a_failure_that_does_not_count_spoils_nothing() -> None:
    found = {"t::new": "PASSED", "t::flaky": "FAILED"}
    assert is_solved(found, fail_to_pass=["t::new"], pass_to_pass=[], exit_code=1)


def graded(folder: Path, command: str, deleted: list[str]) -> tuple[int, str | None]:
    """Exit code and reward of the script as a sandbox runs it."""
    tests = folder / "tests"
    (tests / "files").mkdir(parents=True)
    (tests / "files" / "test_a.py").write_text("hidden\n")
    (tests / "grade.py").write_bytes(Path(swebench_grader.__file__).read_bytes())
    expected = {"fail_to_pass": ["t::a"], "pass_to_pass": [], "deleted": deleted}
    (tests / "expected.json").write_text(json.dumps({**expected, "command": command}))
    (folder / "workspace").mkdir()
    (folder / "workspace" / "test_a.py").write_text("the agent's\n")
    (folder / "workspace" / "old.py").write_text("old\n")
    reward = folder / "logs" / "reward.txt"
    words = [sys.executable, str(tests / "grade.py"), str(folder / "workspace"), str(reward)]
    done = subprocess.run(words, check=False, capture_output=True, timeout=60)
    return done.returncode, reward.read_text() if reward.exists() else None


def test_hidden_files_come_over_the_agent_s(tmp_path: Path) -> None:
    command = "grep -q hidden test_a.py && [ ! -e old.py ] && echo PASSED t::a"
    assert graded(tmp_path, command, ["old.py"]) == (0, "1\n")


def test_a_log_without_results_is_no_reward(tmp_path: Path) -> None:
    assert graded(tmp_path, "echo 'No module named pytest' >&2; exit 1", []) == (1, None)


def test_what_tests_leave_running_is_ended(tmp_path: Path) -> None:
    command = "sleep 600 & echo $! > ../logs/left; echo FAILED t::a"
    assert graded(tmp_path, command, []) == (0, "0\n")
    try:
        left = os.pidfd_open(int((tmp_path / "logs" / "left").read_text()))
    except ProcessLookupError:
        return
    try:
        assert select.select([left], [], [], 60)[0], "it runs on"
    finally:
        os.close(left)
