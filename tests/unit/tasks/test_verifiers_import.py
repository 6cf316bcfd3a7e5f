"""Rows of verifiers tasksets as task folders, and rows that are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from etude.common.harbor import task as harbor_task
from etude.envserver.tasks.formats import command

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "tasks" / "rename-columns"
ROW: dict[str, Any] = {
    "idx": 3,
    "prompt": "Write the sum to sum.txt.",
    "timeout": {"scoring": 20.0},
    "skills": [],
    "network_allow": ["*"],
    "answer": 12,
}


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    return folder


def imported(tmp_path: Path, *rows: object, tests: Path | None, more: tuple[str, ...] = ()) -> int:
    file = tmp_path / "rows.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines))
    words = ["verifiers", str(file), "--out", str(tmp_path / "out"), *more]
    return command.main([*words, *(("--tests", str(tests)) if tests else ())])


def test_a_row_finds_its_own_data_beside_the_tests(tmp_path: Path, tests: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (first / "numbers.txt").write_text("5 7\n")
    more = ("--environment", str(first), "--image", "python")
    assert imported(tmp_path, ROW, tests=tests, more=more) == 0
    task = harbor_task.read_task(tmp_path / "out" / "task-3")
    assert task.instruction == ROW["prompt"]
    assert json.loads(task.tests()["row.json"])["answer"] == 12
    assert harbor_task.read_files(task.environment) == {"numbers.txt": b"5 7\n"}
    assert (task.image, task.verifier_timeout_s) == ("python", 20)


def test_a_trace_has_its_task_in_it(tmp_path: Path, tests: Path) -> None:
    trace = {"nodes": [], "task": {"type": "Sum", "data": {**ROW, "id": "sum/7"}}}
    assert imported(tmp_path, trace, tests=tests) == 0
    assert harbor_task.read_task(tmp_path / "out" / "sum-7").instruction == ROW["prompt"]


def test_a_row_that_names_a_harbor_folder_is_that_task(tmp_path: Path) -> None:
    row = {"task_dir": str(EXAMPLE), "prompt": "x"}
    assert imported(tmp_path, row, tests=None, more=("--files",)) == 0
    task = harbor_task.read_task(tmp_path / "out" / "rename-columns")
    assert task.tests() == harbor_task.read_task(EXAMPLE).tests()


def test_what_is_otherwise_here_is_said(
    tmp_path: Path, tests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(tmp_path, {**ROW, "image": "a:1", "workdir": "/app"}, tests=tests) == 0
    said = capsys.readouterr().err
    assert "image 'a:1' is not pulled" in said
    assert "its folder '/app' is /workspace here" in said


BAD: dict[str, object] = {
    "no JSON": "{",
    "no object": "[1]",
    "depth": "[" * 50_000,
    "no prompt": {**ROW, "prompt": None},
    "an empty prompt": {**ROW, "prompt": " "},
    "half a character": '{"prompt": "\\ud800"}',
    "half a character in a message": '{"prompt": [{"role": "user", "content": "\\ud800"}]}',
    "a prompt that is a number": {**ROW, "prompt": 1},
    "a conversation": {**ROW, "prompt": [{"role": "assistant", "content": "x"}]},
    "an image in the prompt": {
        **ROW,
        "prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    },
    "another user": {**ROW, "agent_user": "root"},
    "skills": {**ROW, "skills": ["x"]},
    "artifacts": {**ROW, "artifacts": [{"path": "/x"}]},
    "no time": {**ROW, "timeout": {"scoring": 0}},
    "a place before the first": {**ROW, "idx": -1},
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_is_none_is_refused(
    case: str, tmp_path: Path, tests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(tmp_path, BAD[case], tests=tests) == 1
    assert "rows.jsonl:1: " in capsys.readouterr().err


def test_rewards_that_are_code_need_tests(
    tmp_path: Path, tests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(tmp_path, ROW, tests=None) == 1
    assert "--tests FOLDER" in capsys.readouterr().err
    (tests / "test.sh").unlink()
    assert imported(tmp_path, ROW, tests=tests) == 1
    assert imported(tmp_path, ROW, tests=tests / "absent") == 3
