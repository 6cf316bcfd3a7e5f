"""Rewards end to end: real processes, real sandboxes, hidden tests that really run."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from etude.common.rpc import channels
from etude.demo.problems import Problem
from etude.v1 import environments_pb2, rewards_pb2, rewards_pb2_grpc, rollout_pb2

if TYPE_CHECKING:  # the stubs know an async class that the generated module lacks
    Stub = rewards_pb2_grpc.RewardServiceAsyncStub

DEADLINE_S = 120.0


@pytest.fixture
async def stub(stack: Any) -> AsyncIterator["Stub"]:
    async with channels.dial(stack.rewards.target) as channel:
        yield rewards_pb2_grpc.RewardServiceStub(channel)


def _diff(files: dict[str, str]) -> bytes:
    diff = environments_pb2.WorkspaceDiff()
    for path, text in sorted(files.items()):
        diff.written.add(path=path, content=text.encode())
    return diff.SerializeToString()


def _rollout(name: str, files: dict[str, str], **rest: Any) -> rollout_pb2.Rollout:
    rest.setdefault("ending", rollout_pb2.ENDING_STOPPED)
    return rollout_pb2.Rollout(
        rollout_id=name,
        diff=_diff(files),
        trace_id="0af7651916cd43dd8448eb211c80319c",
        span_id="b7ad6b7169203331",
        **rest,
    )


def _request(folder: Path, rollouts: list[rollout_pb2.Rollout]) -> rewards_pb2.ScoreRequest:
    return rewards_pb2.ScoreRequest(
        group_id="g", task_uri=folder.as_uri(), pool="repos", rollouts=rollouts
    )


def _repaired(problem: Problem) -> dict[str, str]:
    return {problem.repository.target.path: problem.repository.target.source()}


@pytest.mark.smoke
async def test_a_group_is_scored_by_hidden_tests_in_sandboxes(stack: Any, stub: "Stub") -> None:
    problem, task = stack.problems[0], stack.tasks[0]
    target = problem.repository.target
    wrong = target.source(problem.repository.bug)
    planted = dict.fromkeys(("conftest.py", "sitecustomize.py", "tests/test_repo.py"), "exit(0)\n")
    rollouts = [
        _rollout("repaired", _repaired(problem)),
        _rollout("untouched", {}),
        _rollout("again", _repaired(problem)),
        _rollout("hangs", {target.path: "while True: pass\n"}),
        _rollout("planted", planted | {target.path: wrong}),
        _rollout("spoofs", {target.path: "import os\nos._exit(0)\n"}),
        _rollout("late", _repaired(problem), ending=rollout_pb2.ENDING_TURN_LIMIT),
        _rollout("lost", {}, ending=rollout_pb2.ENDING_PLATFORM_FAULT, fault="node gone"),
    ]
    answer = await stub.Score(_request(task, rollouts), timeout=DEADLINE_S)
    records = {record.rollout_id: record for record in answer.records}
    assert list(records) == [rollout.rollout_id for rollout in rollouts]
    assert records["lost"].fault.reason == "RolloutFault"
    rewards = {name: record.reward for name, record in records.items() if name != "lost"}
    assert rewards == {
        "repaired": 1.0,
        "untouched": 0.0,
        "again": 1.0,
        "hangs": 0.0,
        "planted": 0.0,
        "spoofs": 0.0,
        "late": pytest.approx(-0.1),
    }


async def test_scoring_again_gives_the_same_records(stack: Any, stub: "Stub") -> None:
    request = _request(stack.tasks[1], [_rollout("a", _repaired(stack.problems[1]))])
    first = await stub.Score(request, timeout=DEADLINE_S)
    assert await stub.Score(request, timeout=DEADLINE_S) == first
    assert first.records[0].success == 1


async def test_more_diffs_than_slots_are_all_graded(stack: Any, stub: "Stub") -> None:
    problem, task = stack.problems[2], stack.tasks[2]
    target = problem.repository.target
    different = [
        _rollout(f"{index}", {target.path: target.source() + f"# {index}\n"}) for index in range(12)
    ]
    answer = await stub.Score(_request(task, different), timeout=DEADLINE_S)
    assert [record.reward for record in answer.records] == [1.0] * 12


async def test_many_groups_at_once_all_come_back(stack: Any, stub: "Stub") -> None:
    async def score(problem: Problem, task: Path) -> list[float]:
        rollouts = [_rollout("yes", _repaired(problem)), _rollout("no", {})]
        answer = await stub.Score(_request(task, rollouts), timeout=DEADLINE_S)
        return [record.reward for record in answer.records]

    pairs = zip(stack.problems, stack.tasks, strict=True)
    scored = await asyncio.gather(*(score(problem, task) for problem, task in pairs))
    assert scored == [[1.0, 0.0]] * len(stack.tasks)


async def test_a_verifier_broken_on_the_base_masks_the_group(
    stack: Any, stub: "Stub", tmp_path: Path
) -> None:
    task = tmp_path / "train-x"
    for source in stack.tasks[3].rglob("*"):
        if source.is_file():
            target = task / source.relative_to(stack.tasks[3])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    (task / "tests" / "verify.py").write_text("raise RuntimeError\n")
    rollouts = [_rollout("a", _repaired(stack.problems[3])), _rollout("b", {})]
    answer = await stub.Score(_request(task, rollouts), timeout=DEADLINE_S)
    assert [record.fault.reason for record in answer.records] == ["GraderError"] * 2


async def test_a_killed_host_is_a_fault_and_its_successor_grades(stack: Any, stub: "Stub") -> None:
    problem, task = stack.problems[4], stack.tasks[4]
    changed = {path: text + "# fresh\n" for path, text in _repaired(problem).items()}
    request = _request(task, [_rollout("a", changed)])
    stack.node.stop(signal.SIGKILL)
    pending = asyncio.create_task(_call(stub, request), name="score without a node")
    await asyncio.to_thread(stack.node.start)
    answer = await pending
    if answer.records[0].HasField("fault"):
        assert answer.records[0].fault.reason == "EnvironmentLost"
        answer = await stub.Score(request, timeout=DEADLINE_S)
    assert answer.records[0].reward == 1.0


async def _call(stub: "Stub", request: rewards_pb2.ScoreRequest) -> rewards_pb2.ScoreResponse:
    return await stub.Score(request, timeout=DEADLINE_S)


async def test_stopping_is_orderly_and_leaves_trace_spans(stack: Any) -> None:
    assert await asyncio.to_thread(stack.rewards.stop) == 0
    traces = stack.rewards.folder.parent / "traces.jsonl"
    spans = [json.loads(line) for line in traces.read_text().splitlines()]
    assert {"score", "reward"} <= {span["name"] for span in spans}
    rewards = [span for span in spans if span["name"] == "reward"]
    assert {span["trace_id"] for span in rewards} == {"0af7651916cd43dd8448eb211c80319c"}
