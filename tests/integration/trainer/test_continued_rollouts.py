"""Rollouts whose worker died: they go on from their last turn, in their environments or others."""

import asyncio
import contextlib
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.api.storage import Storage
from etude.common.errors import FullError
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, WorkerConfig
from etude.trainer.rollouts.trajectories.resume_counts import Resume, ResumeCause, ResumeKind
from etude.trainer.rollouts.worker import RolloutWorker
from etude.trainer.routing.table import EngineState, Purpose, RoutingTable
from etude.v1 import environments_pb2
from etude.v1.journal_pb2 import JournalRollout

CALL = "<tool_call><function=read_file><parameter=path>a.py</parameter></function></tool_call>"
EDIT = (
    "<tool_call><function=run_terminal><parameter=command>make</parameter></function></tool_call>"
)

PROGRAM = """
import asyncio, pickle, sys
from etude.trainer.rollouts.worker import RolloutWorker

async def main():
    config, order = pickle.load(sys.stdin.buffer)
    await RolloutWorker(config).run_group(order)

asyncio.run(main())
"""


@pytest.fixture
def task_uri(tmp_path: Path) -> str:
    folder = tmp_path / "tasks" / "fix-add"
    folder.mkdir(parents=True)
    (folder / "instruction.md").write_text("Fix add.\n")
    (folder / "task.toml").write_text("")
    return folder.as_uri()


@pytest.fixture
def config(partners: Any, model_folder: Path, tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(
        run="run",
        model_folder=model_folder,
        brokers={"repos": partners.target},
        templates={"repos": "python"},
        rewards_target=partners.target,
        score_timeout_s=30,
        storage=Storage(uri=f"file://{tmp_path}/run"),
        outage_s=5,
    )


@pytest.fixture
async def successor(config: WorkerConfig) -> AsyncIterator[RolloutWorker]:
    made = RolloutWorker(config)
    yield made
    await made.close()


def make_order(partners: Any, task_uri: str, count: int = 2) -> GroupRequest:
    return GroupRequest(
        group_id="rl-000007",
        task_id="train/fix-add",
        task_uri=task_uri,
        environment="repos",
        indices=tuple(range(count)),
        seed=11,
        temperature=1.0,
        routing=RoutingTable(revision=1, engines=((partners.target, EngineState.LIVE),)),
        limits=RolloutPolicy(toolset="Compact", max_tokens=900, timeout_seconds=60, retries=1),
        epoch=1,
    )


async def run_until_killed(
    partners: Any,
    config: WorkerConfig,
    order: GroupRequest,
    *,
    answers: int,
    waiting: int | None = None,
) -> None:
    """Run a group in a process of its own, which is killed once engines have answered so often.

    All of its rollouts wait for an answer then, unless it is said how many do.
    """
    partners.engine.holds_after = answers
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((config, order)))
    process.stdin.close()
    async with asyncio.timeout(60):
        num_waiting = len(order.indices) if waiting is None else waiting
        while len(partners.engine.requests) < answers + num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.6)  # two linger times of the log
    process.send_signal(signal.SIGKILL)
    await process.wait()
    partners.engine.holds_after = None


@contextlib.asynccontextmanager
async def silent_worker(
    partners: Any, config: WorkerConfig, order: GroupRequest, *, answers: int
) -> AsyncIterator[tuple[RolloutWorker, "asyncio.Task[GroupResult]"]]:
    """A worker that counts as lost, as by a cut network, and is still there."""
    partners.engine.holds_after = answers
    worker = RolloutWorker(config)
    running = asyncio.create_task(worker.run_group(order))
    async with asyncio.timeout(60):
        while len(partners.engine.requests) < answers + len(order.indices):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.6)
    partners.engine.holds_after = None
    yield worker, running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await worker.close()


def rollouts(result: GroupResult) -> list[JournalRollout]:
    return [JournalRollout.FromString(data) for data in result.records]


async def test_rollouts_of_a_killed_worker_go_on_from_their_last_turns(
    partners: Any, config: WorkerConfig, successor: RolloutWorker, task_uri: str
) -> None:
    partners.engine.turns = (CALL, EDIT, "Done.")
    order = make_order(partners, task_uri)
    await run_until_killed(partners, config, order, answers=4)
    asked, ran = len(partners.engine.requests), list(partners.node.ran)

    result = await successor.run_group(replace(order, dispatch=1, is_continued=True))

    found = rollouts(result)
    assert [each.reward.reward for each in found] == [1.0, 1.0]
    assert [each.rollout.costs.turns for each in found] == [3, 3]
    assert [len(each.rollout.calls) for each in found] == [2, 2]
    assert len(partners.engine.requests) == asked + 2  # the last turn of each
    assert partners.node.ran == ran  # and no call again
    assert len(partners.broker.launches) == 1
    assert dict(result.resumes.counts) == {(Resume.CONTINUED, ResumeCause.WORKER): 2}


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_task_of_several_steps_goes_on_in_the_step_that_was_under_way(
    partners: Any,
    config: WorkerConfig,
    successor: RolloutWorker,
    task_uri: str,
    tmp_path: Path,
    *,
    is_gone: bool,
) -> None:
    task = tmp_path / "tasks" / "fix-add"
    (task / "task.toml").write_text("[[steps]]\nname = 'bake'\n[[steps]]\nname = 'ice'\n")
    for step in ("bake", "ice"):
        (task / "steps" / step / "workdir").mkdir(parents=True)
        (task / "steps" / step / "instruction.md").write_text(f"{step} it.\n")
        (task / "steps" / step / "workdir" / "sugar.txt").write_text("sugar")
    partners.engine.turns = (EDIT, "Done.")
    partners.node.answer, partners.node.diff = b"ready", (b"baked",)
    order = make_order(partners, task_uri, count=1)
    await run_until_killed(partners, config, order, answers=2)
    ran = list(partners.node.ran)
    partners.node.diff = (b"baked and iced",)
    if is_gone:
        [[lost]] = partners.broker.granted.values()
        partners.broker.missing = {lost.lease_id}

    result = await successor.run_group(replace(order, dispatch=1, is_continued=True))

    [scored] = partners.rewards.requests[-1].rollouts
    assert [(each.name, each.diff) for each in scored.steps] == [("bake", b"baked"), ("ice", b"")]
    assert scored.diff == b"baked and iced"
    calls = [call_id for _, call_id in ran]
    assert calls[-1].startswith("ice/")
    again = [call_id for _, call_id in partners.node.ran[len(ran) :]]
    assert again == (calls if is_gone else [])
    resume = Resume.REPLAYED if is_gone else Resume.CONTINUED
    assert dict(result.resumes.counts) == {ResumeKind(resume, ResumeCause.WORKER): 1}


async def test_calls_are_repeated_in_another_environment_when_the_lease_is_gone(
    partners: Any, config: WorkerConfig, successor: RolloutWorker, task_uri: str
) -> None:
    partners.engine.turns = (CALL, EDIT, "Done.")
    order = make_order(partners, task_uri, count=1)
    async with silent_worker(partners, config, order, answers=2):
        asked, ran = len(partners.engine.requests), len(partners.node.ran)
        [[lost]] = partners.broker.granted.values()
        partners.broker.missing = {lost.lease_id}

        result = await successor.run_group(replace(order, epoch=2, is_continued=True))

    [found] = rollouts(result)
    assert found.reward.reward == 1.0
    assert len(partners.engine.requests) == asked + 1
    assert [call_id for _, call_id in partners.node.ran[ran:]] == ["1.0"]  # reads are not
    assert len(partners.broker.launches) == 2
    assert dict(result.resumes.counts) == {(Resume.REPLAYED, ResumeCause.CONTROLLER): 1}


async def test_an_environment_whose_lease_expired_is_resumed(
    partners: Any, config: WorkerConfig, successor: RolloutWorker, task_uri: str
) -> None:
    partners.engine.turns = (EDIT, "Done.")
    order = make_order(partners, task_uri, count=1)
    async with silent_worker(partners, config, order, answers=1):
        [[lost]] = partners.broker.granted.values()
        partners.broker.missing = {lost.lease_id}
        partners.states.on_resume = partners.broker.missing.discard

        result = await successor.run_group(replace(order, dispatch=1, is_continued=True))

    assert partners.broker.launches[0].on_expiry == environments_pb2.ON_EXPIRY_PAUSE
    assert [call_id for _, call_id in partners.node.ran] == ["0.0"]
    assert dict(result.resumes.counts) == {(Resume.CONTINUED, ResumeCause.WORKER): 1}


async def test_a_full_host_is_waited_for_as_a_new_environment_would_be(
    partners: Any, config: WorkerConfig, successor: RolloutWorker, task_uri: str
) -> None:
    partners.engine.turns = (EDIT, "Done.")
    order = make_order(partners, task_uri, count=1)
    full = [FullError("all 2 slots are taken", retry_after_s=0.05)] * 3
    async with silent_worker(partners, config, order, answers=1):
        [[lost]] = partners.broker.granted.values()
        partners.broker.missing = {lost.lease_id}

        def resume(lease_id: str) -> None:
            if full:
                raise full.pop()
            partners.broker.missing.discard(lease_id)

        partners.states.on_resume = resume
        result = await successor.run_group(replace(order, dispatch=1, is_continued=True))

    assert not full
    assert [call_id for _, call_id in partners.node.ran] == ["0.0"]
    assert dict(result.resumes.counts) == {(Resume.CONTINUED, ResumeCause.WORKER): 1}


@pytest.mark.parametrize("ending", ["cancel", "close"])
async def test_a_worker_that_ends_before_its_rollouts_leaves_their_environments(
    partners: Any, config: WorkerConfig, successor: RolloutWorker, task_uri: str, ending: str
) -> None:
    partners.engine.turns = (CALL, EDIT, "Done.")
    order = make_order(partners, task_uri)
    async with silent_worker(partners, config, order, answers=4) as (worker, running):
        if ending == "cancel":
            await worker.cancel_group(order.group_id, is_dropped=False)
            assert not (await running).records
        await worker.close()
    assert not partners.broker.released
    ran = list(partners.node.ran)

    result = await successor.run_group(replace(order, epoch=2, is_continued=True))

    assert partners.node.ran == ran
    assert dict(result.resumes.counts) == {(Resume.CONTINUED, ResumeCause.CONTROLLER): 2}
    await successor.close()
    assert len(set(partners.broker.released)) == 2


async def test_a_rollout_that_had_ended_is_handed_in_as_recorded_without_an_environment(
    partners: Any, config: WorkerConfig, successor: RolloutWorker, task_uri: str
) -> None:
    partners.engine.turns = (EDIT, "Done.")
    order = make_order(partners, task_uri)
    await run_until_killed(partners, config, order, answers=3, waiting=1)
    [released] = partners.broker.released
    partners.broker.missing, partners.node.diff = {released}, (b"another",)
    asked, ran = len(partners.engine.requests), list(partners.node.ran)

    result = await successor.run_group(replace(order, epoch=2, is_continued=True))

    found = rollouts(result)
    assert [each.rollout.costs.turns for each in found] == [2, 2]
    assert len(partners.engine.requests) == asked + 1
    assert partners.node.ran == ran
    assert len(partners.broker.launches) == 1
    scored = partners.rewards.requests[-1].rollouts
    assert sorted(each.diff for each in scored) == [b"another", b"the diff"]
    assert dict(result.resumes.counts) == {(Resume.CONTINUED, ResumeCause.CONTROLLER): 2}


@pytest.mark.parametrize("purpose", [Purpose.TRAINING, Purpose.EVALUATION])
async def test_environments_without_a_successor_are_released_at_once(
    partners: Any, config: WorkerConfig, task_uri: str, purpose: Purpose
) -> None:
    partners.engine.turns = (EDIT, "Done.")
    order = replace(make_order(partners, task_uri), purpose=purpose)
    async with silent_worker(partners, config, order, answers=2) as (worker, running):
        if purpose is Purpose.TRAINING:
            await worker.cancel_group(order.group_id, is_dropped=True)
        else:
            running.cancel()
        async with asyncio.timeout(10):
            while len(partners.broker.released) < 2:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.01)


async def run_until_called(
    partners: Any, config: WorkerConfig, task_uri: str
) -> tuple[RolloutWorker, "asyncio.Task[GroupResult]"]:
    """Run one rollout up to its first call, by a worker that waits for no one that is away."""
    worker = RolloutWorker(replace(config, outage_s=0.1))
    running = asyncio.create_task(worker.run_group(make_order(partners, task_uri, count=1)))
    async with asyncio.timeout(30):
        while not partners.node.ran:  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(0.01)
    return worker, running


async def test_a_rollout_whose_engines_were_away_goes_on_in_its_environment(
    partners: Any, config: WorkerConfig, task_uri: str
) -> None:
    partners.engine.turns, partners.engine.delay_s = (EDIT, "Done."), 0.3
    worker, running = await run_until_called(partners, config, task_uri)
    partners.engine.aborts = 2  # the first may have a substitute

    result = await running

    await worker.close()
    [found] = rollouts(result)
    assert (result.retried, found.reward.reward) == (1, 1.0)
    assert [call_id for _, call_id in partners.node.ran] == ["0.0"]
    assert len(partners.broker.launches) == len(set(partners.broker.released)) == 1
    assert dict(result.resumes.counts) == {(Resume.CONTINUED, ResumeCause.FAULT): 1}


async def test_a_rollout_whose_host_refused_a_call_goes_on_in_another_environment(
    partners: Any, config: WorkerConfig, task_uri: str
) -> None:
    partners.engine.turns, partners.engine.delay_s = (EDIT, CALL, "Done."), 0.3
    worker, running = await run_until_called(partners, config, task_uri)
    partners.node.refusals = 1

    result = await running

    await worker.close()
    assert len(partners.broker.launches) == len(set(partners.broker.released)) == 2
    assert dict(result.resumes.counts) == {(Resume.REPLAYED, ResumeCause.FAULT): 1}


async def test_a_rollout_is_redrawn_when_a_repeated_call_has_another_result(
    partners: Any, config: WorkerConfig, successor: RolloutWorker, task_uri: str
) -> None:
    partners.engine.turns = (EDIT, "Done.")
    order = make_order(partners, task_uri, count=1)
    async with silent_worker(partners, config, order, answers=1):
        [[lost]] = partners.broker.granted.values()
        partners.broker.missing = {lost.lease_id}
        partners.node.answer = b"x = 2"

        result = await successor.run_group(replace(order, dispatch=1, is_continued=True))

    [found] = rollouts(result)
    assert found.reward.reward == 1.0
    assert "x = 2" in found.rollout.calls[0].result
    counts = result.resumes.counts
    assert counts[ResumeKind(Resume.REDRAWN, ResumeCause.DIVERGED)] == 1
    assert result.resumes.lost == 1
    assert result.retried == 1


async def test_a_rollout_goes_on_after_each_of_several_deaths(
    partners: Any, config: WorkerConfig, successor: RolloutWorker, task_uri: str
) -> None:
    partners.engine.turns = (EDIT, CALL, EDIT, "Done.")
    order = make_order(partners, task_uri, count=1)
    await run_until_killed(partners, config, order, answers=1)
    again = replace(order, dispatch=1, is_continued=True)
    await run_until_killed(partners, config, again, answers=3)
    asked = len(partners.engine.requests)

    result = await successor.run_group(replace(again, dispatch=2))

    [found] = rollouts(result)
    assert found.rollout.costs.turns == 4
    assert len(partners.engine.requests) == asked + 2  # both workers died with the next turn asked
    assert [call_id for _, call_id in partners.node.ran] == ["0.0", "1.0", "2.0"]
    assert len(partners.broker.launches) == 1
