"""Traces of our rollouts, and tasksets, through the models of the verifiers package."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_tokens import encode_opening, encode_results
from tests.support.oracles import Oracle

from etude.agent.chat import ChatFormat
from etude.agent.chat.pieces import PieceReader
from etude.common.harbor import task
from etude.demo import corpus, model_folder, tokenizer
from etude.demo.problems import Source
from etude.envserver.tasks.formats import command
from etude.trainer.commands import verifiers_traces
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2

VERIFIERS = Oracle(requirements=("verifiers==0.4.0",))
"""It pins an MCP library, and wants a web server and three model providers' clients."""

READ = """
import json, sys
import verifiers.v1 as vf
for line in sys.stdin:
    given = json.loads(line)
    trace = vf.WireTrace.model_validate(given)
    again = trace.to_record(float_decimals=None)
    second = vf.WireTrace.model_validate(again).to_record(float_decimals=None)
    print(json.dumps({
        "again": again,
        "is_stable": again == second,
        "token_ids": [branch.token_ids for branch in trace.branches],
        "mask": [branch.sampled_mask for branch in trace.branches],
        "logprobs": [branch.logprobs for branch in trace.branches],
        "reward": trace.reward, "has_error": trace.has_error, "turns": trace.num_turns,
        "is_truncated": trace.is_truncated, "last_reply": trace.last_reply,
        "tools": [message.tool_call_id for message in trace.tool_messages],
        "output": trace.num_output_tokens,
    }))
"""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("model")
    shown = corpus.demonstrate_all(Source(1).take("traces", 40), 1)
    texts = (text for each in shown for text in corpus.transcript_texts(each.messages))
    model_folder.write(folder, tokenizer.train(texts))
    return ChatFormat.load(folder)


def link(chat: ChatFormat, *turns: tuple[str, list[str]], closed: bool = True) -> rollout_pb2.Link:
    """A context: an opening, then what was sampled and what the tools said."""
    found = rollout_pb2.Link()

    def add(ids: list[int], *, sampled: bool) -> None:
        found.token_ids.extend(ids)
        found.loss_mask += bytes([sampled]) * len(ids)
        found.sampler_logprobs.extend([-0.5 - 0.25 * sampled] * len(ids))

    add(encode_opening(chat, "Be careful.", "Repair it."), sampled=False)
    for text, results in turns:
        ids = chat.completion(text)
        add(ids if closed or results else ids[:-1], sampled=True)
        if results:
            add(encode_results(chat, results), sampled=False)
    return found


def call(turn: int, name: str, *, malformed: bool = False) -> rollout_pb2.CallRecord:
    return rollout_pb2.CallRecord(
        turn=turn, name=name, arguments_json='{"path": "a"}', is_malformed=malformed
    )


def records(chat: ChatFormat) -> dict[str, journal_pb2.JournalRollout]:
    asked = (
        "I look.<tool_call><function=read_file><parameter=path>a</parameter></function></tool_call>"
    )
    whole = rollout_pb2.Rollout(
        rollout_id="whole",
        task_id="train-0001",
        group_id="g",
        ending=rollout_pb2.ENDING_STOPPED,
        links=[link(chat, (asked, ["one <|end|> é", "two"]), ("Done.", []))],
        calls=[call(0, "read_file"), call(0, "", malformed=True)],
        costs=rollout_pb2.Costs(turns=2, token_seconds=2.5, tool_seconds=0.5),
    )
    parts = [
        rewards_pb2.RewardPart(name="tests", value=1.0, weight=1.0),
        rewards_pb2.RewardPart(name="length", value=-0.5, weight=0.25),
    ]
    scored = rewards_pb2.RewardRecord(reward=0.875, success=1.0, parts=parts)
    cut = rollout_pb2.Rollout(
        rollout_id="cut",
        task_id="t",
        ending=rollout_pb2.ENDING_LENGTH_LIMIT,
        links=[link(chat, ("words without", []), closed=False)],
    )
    folded = rollout_pb2.Rollout(
        rollout_id="folded",
        task_id="t",
        ending=rollout_pb2.ENDING_TURN_LIMIT,
        links=[link(chat, (asked, ["one"])), link(chat, ("Done.", []))],
        calls=[call(0, "read_file")],
    )
    lost = rollout_pb2.Rollout(
        rollout_id="lost", task_id="t", ending=rollout_pb2.ENDING_PLATFORM_FAULT, fault="gone"
    )
    fault = rewards_pb2.RewardRecord(
        fault=rewards_pb2.RewardFault(reason="GraderError", message="no number")
    )
    return {
        "whole": journal_pb2.JournalRollout(rollout=whole, reward=scored),
        "cut": journal_pb2.JournalRollout(rollout=cut, reward=rewards_pb2.RewardRecord(reward=0)),
        "folded": journal_pb2.JournalRollout(rollout=folded, reward=scored),
        "lost": journal_pb2.JournalRollout(rollout=lost, reward=fault),
    }


@pytest.fixture(scope="module")
def read(chat: ChatFormat) -> dict[str, dict[str, Any]]:
    """What the package makes of each of our traces."""
    given = records(chat)
    answers = VERIFIERS.answers(
        READ, [verifiers_traces.trace(record, PieceReader.of(chat)) for record in given.values()]
    )
    return dict(zip(given, answers, strict=True))


def test_the_package_keeps_everything_that_a_trace_says(
    chat: ChatFormat, read: dict[str, dict[str, Any]]
) -> None:
    for name, record in records(chat).items():
        ours, theirs = verifiers_traces.trace(record, PieceReader.of(chat)), read[name]["again"]
        assert read[name]["is_stable"]
        missing = {key for key in ours if not _within(ours[key], theirs[key])}
        assert missing == set(), name


def _within(ours: object, theirs: object) -> bool:
    """Whether all that we said is there; the package adds what is empty."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return all(key in theirs and _within(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_within, ours, theirs))
    return ours == theirs


def test_branches_are_contexts_token_by_token(
    chat: ChatFormat, read: dict[str, dict[str, Any]]
) -> None:
    for name, record in records(chat).items():
        links = record.rollout.links
        assert read[name]["token_ids"] == [list(each.token_ids) for each in links]
        assert read[name]["mask"] == [[bool(b) for b in each.loss_mask] for each in links]
        assert read[name]["logprobs"] == [
            [p if m else 0.0 for p, m in zip(each.sampler_logprobs, each.loss_mask, strict=True)]
            for each in links
        ]
        assert read[name]["output"] == sum(sum(each.loss_mask) for each in links)


def test_rewards_endings_and_calls_mean_the_same_there(read: dict[str, dict[str, Any]]) -> None:
    assert {name: found["reward"] for name, found in read.items()} == {
        "whole": 0.875,
        "cut": 0,
        "folded": 0.875,
        "lost": 0,
    }
    assert [name for name, found in read.items() if found["has_error"]] == ["lost"]
    assert [name for name, found in read.items() if found["is_truncated"]] == ["cut", "folded"]
    assert read["whole"]["tools"] == ["0.0", "0.1"]
    assert read["whole"]["last_reply"] == "Done."
    assert {name: found["turns"] for name, found in read.items()} == {
        "whole": 2,
        "cut": 1,
        "folded": 2,
        "lost": 0,
    }


def test_messages_are_what_was_said(chat: ChatFormat) -> None:
    found = verifiers_traces.trace(records(chat)["whole"], PieceReader.of(chat))
    messages = [node["message"] for node in found["nodes"]]
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant")
    ]
    assert [message["content"] for message in messages] == [
        *("Be careful.", "Repair it.", "I look.", "one <|end|> é", "two", "Done.")
    ]
    assert found["task"]["data"]["prompt"] == "Repair it."


WRITE = """
import json, sys
import verifiers.v1 as vf
class Row(vf.TaskData):
    answer: int = 0
for line in sys.stdin:
    given = json.loads(line)
    if "answer" in given:
        row = Row(**given)
        print(json.dumps(row.model_dump(mode="json")))
    else:
        print(json.dumps(vf.WireTaskData(**given).model_dump(mode="json")))
"""


def test_rows_that_the_package_writes_become_tasks(tmp_path: Path) -> None:
    given = [
        {"idx": 0, "id": "sum-1", "prompt": "Write 3 to answer.txt", "answer": 3},
        {
            "idx": 1,
            "prompt": [{"role": "user", "content": "Write 4"}],
            "system_prompt": "Be exact.",
        },
    ]
    rows = VERIFIERS.answers(WRITE, given)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    words = ["verifiers", str(tmp_path / "rows.jsonl"), "--tests", str(tmp_path / "tests")]
    assert command.main([*words, "--out", str(tmp_path / "out")]) == 0
    tasks = [task.read_task(folder) for folder in task.task_folders(tmp_path / "out")]
    assert {task.task_id: task.instruction for task in tasks} == {
        "sum-1": "Write 3 to answer.txt",
        "task-1": "Be exact.\n\nWrite 4",
    }
    (first, _) = sorted(tasks, key=lambda task: task.task_id)
    assert json.loads(first.tests()["row.json"])["answer"] == 3
