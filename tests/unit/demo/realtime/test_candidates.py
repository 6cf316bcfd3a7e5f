"""Candidates of the real-time demo: transcripts that end with questions, checkpoints by step."""

import json
from pathlib import Path

import pytest

from etude.agent.chat import Message
from etude.common.errors import UserError
from etude.demo.realtime.candidates import NUM_QUESTIONS, ask_at_end, find_candidates
from etude.demo.realtime.inputs import ANSWERS, QUESTIONS

SOLVED: list[Message] = [
    {"role": "system", "content": "Tools."},
    {"role": "user", "content": "Mend it."},
    {"role": "assistant", "content": "<tool_call>…</tool_call>"},
    {"role": "tool", "content": "ok"},
    {"role": "assistant", "content": "Done."},
]


def test_an_asking_transcript_works_as_the_solved_one_and_ends_with_a_question() -> None:
    asked = ask_at_end(SOLVED)
    assert asked[:4] == SOLVED[:4]
    behind = asked[4:]
    assert [each["content"] in QUESTIONS for each in behind if each["role"] == "assistant"] == [
        True
    ] * NUM_QUESTIONS
    assert all(each["content"] in ANSWERS for each in behind if each["role"] == "user")
    assert behind[-1]["role"] == "assistant"
    assert len(behind) == 2 * NUM_QUESTIONS - 1


def write_run(folder: Path, *steps: int) -> None:
    phases = [
        {"name": name, "maxSteps": count}
        for name, count in (
            ("served", 160),
            ("publish-served", 1),
            ("asking", 60),
            ("publish-asking", 1),
            ("damaged", 40),
            ("publish-damaged", 1),
        )
    ]
    run = {"kind": "RLRun", "metadata": {"name": "run"}, "spec": {"phases": phases}}
    saved = [
        {"kind": "Checkpoint", "metadata": {"name": f"run-{step}"}, "status": {"step": step}}
        for step in steps
    ]
    (folder / "objects.json").write_text(json.dumps([run, *saved]))


def test_candidates_are_the_checkpoints_of_the_steps_that_publish(tmp_path: Path) -> None:
    write_run(tmp_path, 160, 161, 221, 222, 262, 263)
    found = find_candidates(tmp_path)
    assert (found.served, found.asking, found.damaged) == ("run-161", "run-222", "run-263")


def test_a_run_without_one_of_them_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, 160, 161, 221, 262, 263)
    with pytest.raises(UserError, match="no checkpoint of step 222"):
        find_candidates(tmp_path)
