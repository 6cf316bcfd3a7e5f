"""Session tasks: long changes for short requests, and each part of the reference is needed."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import warm_etude

from etude.common.errors import UserError
from etude.common.evaluation.quality import count_changed_lines
from etude.common.harbor import task as harbor_task
from etude.demo.sessions import families, generate, task_folders
from etude.demo.sessions.changes import read_changes, split_diff
from etude.demo.sessions.tasks import MAX_REQUEST_CHARS, SessionSource, SessionTask


@pytest.fixture(scope="module")
def tasks() -> list[SessionTask]:
    return list(SessionSource(3).take("held-out", 12))


def test_requests_are_short_and_changes_are_long(tasks: list[SessionTask]) -> None:
    assert all(len(task.request) <= MAX_REQUEST_CHARS for task in tasks)
    changed = [
        sum(count_changed_lines(change.before, change.after) for change in task.changes)
        for task in tasks
    ]
    assert statistics.median(changed) >= 150
    assert min(changed) >= 150
    assert all(len(task.reference) >= 9 for task in tasks)


def test_the_cause_is_not_where_the_user_sees_it(tasks: list[SessionTask]) -> None:
    for task in tasks:
        assert task.symptom != task.family.cause
        assert task.family.cause not in task.request
        assert task.cause in task.reference
        assert task.cause in task.answer()


def test_the_reference_scores_one_and_nothing_zero(tasks: list[SessionTask]) -> None:
    for task in tasks:
        assert task.is_solved_by(task.reference)
        assert not task.is_solved_by({})


def test_a_reference_that_lacks_one_file_scores_zero(tasks: list[SessionTask]) -> None:
    task = tasks[0]
    for path in task.reference:
        part = {other: text for other, text in task.reference.items() if other != path}
        assert not task.is_solved_by(part), path


def test_every_family_and_every_module_is_drawn() -> None:
    drawn = list(SessionSource(0).take("train", 40))
    for family in families.FAMILIES:
        shown = {
            each.path.rpartition("/")[2].removesuffix(".py")
            for task in drawn
            if task.family is family
            for each in task.functions
        }
        assert shown == set(family.symptoms) == set(family.inputs)


def test_logs_show_the_cause_among_louder_lines(tasks: list[SessionTask]) -> None:
    for task in tasks:
        lines = task.logs["logs/application.log"].splitlines()
        telling = [line for line in lines if f"{task.package}.{task.family.cause}:" in line]
        loud = [line for line in lines if " ERROR " in line]
        assert len(telling) == len(task.family.clues)
        assert len(loud) > len(telling)
        assert not any(f".{task.family.cause}:" in line for line in loud)


def test_visible_tests_pass_before_the_change_and_after_it(
    tasks: list[SessionTask], tmp_path: Path
) -> None:
    task = tasks[1]
    for name, files in {"before": {}, "after": task.reference}.items():
        for path, text in (task.workspace() | files).items():
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."],
            cwd=tmp_path / name,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("changed", ["nothing", "reference"])
def test_the_shipped_verifier_agrees(
    changed: str, tasks: list[SessionTask], tmp_path: Path
) -> None:
    task = tasks[2]
    files = task_folders.files(task)
    files |= {
        f"environment/{path}": text.encode()
        for path, text in (task.reference.items() if changed == "reference" else ())
    }
    for path, data in files.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    reward = tmp_path / "reward.txt"
    subprocess.run(
        [sys.executable, tmp_path / "tests/verify.py", tmp_path / "environment", reward],
        cwd=tmp_path / "environment",
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert reward.read_text() == ("1\n" if changed == "reference" else "0\n")


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from etude.demo.sessions.generate import generate;"
        "generate(Path(sys.argv[1]), seed=7, train=1, held_out=2)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True, timeout=120)
    generate.generate(tmp_path / "b", seed=7, train=1, held_out=2)
    generate.generate(tmp_path / "c", seed=8, train=1, held_out=2)
    one, same, other = (
        {
            path.relative_to(tmp_path / name).as_posix(): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in "abc"
    )
    assert one == same
    assert one != other
    folders = harbor_task.task_folders(tmp_path / "a/tasks/held-out")
    assert [harbor_task.read_task(folder).unknown_keys for folder in folders] == [(), ()]
    facts = json.loads(one["facts.json"])
    assert (facts["seed"], facts["train"], facts["held_out"]) == (7, 1, 2)


def test_sizes_out_of_range_are_refused(tmp_path: Path) -> None:
    for train, held_out in ((-1, 4), (0, 0), (5_000, 1)):
        with pytest.raises(UserError, match="--held-out"):
            generate.generate(tmp_path / "x", seed=0, train=train, held_out=held_out)
    assert not (tmp_path / "x").exists()


def test_the_verb_writes_the_suite_and_says_what_it_holds(tmp_path: Path) -> None:
    words = ("tasks", "generate", str(tmp_path / "suite"), "--suite", "sessions")
    done = warm_etude.etude(*words, "--held-out", "2")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"2 held-out tasks, 0 training tasks: requests of \d+ characters,"
        r" \d+ changed lines in 10 files\n",
        done.stdout,
    )
    assert len(harbor_task.task_folders(tmp_path / "suite/tasks/held-out")) == 2
    other = warm_etude.etude(*words[:2], str(tmp_path / "other"), *words[3:], "--traces", "5")
    assert other.returncode == 2
    assert not (tmp_path / "other").exists()


def test_every_word_of_a_family_is_filled_in() -> None:
    for family in families.FAMILIES:
        for setting in family.settings[:2]:
            words = {"package": "lab", "item": "booking", "client": "guest", **setting}
            for change in read_changes(family.name, words):
                assert "$" not in change.before + change.after


def test_a_line_without_a_mark_is_refused() -> None:
    assert split_diff(" a\n-b\n+c\n\n d\n") == ("a\nb\n\nd\n", "a\nc\n\nd\n")
    with pytest.raises(ValueError, match="line 2"):
        split_diff(" a\nb\n")
