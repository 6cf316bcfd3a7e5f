"""Listening to controllers: what one of them does never ends the listening to the others."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from typing_extensions import override

from etude.operator.clock import ManualClock
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Ref
from etude.operator.remotes import followers as following
from etude.operator.remotes.clients import MemoryRemoteClient
from etude.operator.remotes.followers import Followers, ReportSource
from etude.operator.remotes.report_store import ReportPosition, ReportStore
from etude.v1 import environments_pb2, run_pb2

KEY = Ref("RLRun", "lab", "demo")
TARGET = "demo-trainer-0.demo-trainer:7000"
LIMIT_S = 30.0


class BrokenOnce(MemoryRemoteClient):
    """The first to be dialled raises what nobody names."""

    is_broken = True

    @override
    async def watch_run(
        self, target: str, after: ReportPosition
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        self._break()
        async for response in MemoryRemoteClient.watch_run(self, target, after):
            yield response

    @override
    async def watch_pool(self, target: str) -> AsyncIterator[environments_pb2.WatchPoolResponse]:
        self._break()
        async for response in MemoryRemoteClient.watch_pool(self, target):
            yield response

    def _break(self) -> None:
        if self.is_broken:
            self.is_broken = False
            raise ValueError("a certificate that nobody can read")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FIRST_DELAY_S", 0.0)


def event(sequence: int) -> run_pb2.WatchRunResponse:
    return run_pb2.WatchRunResponse(
        run_uid="uid", epoch=1, sequence=sequence, event=run_pb2.RunEvent(reason="Started")
    )


@pytest.mark.parametrize("kind", ["RLRun", "EnvPool"])
async def test_a_peer_that_cannot_be_dialled_as_nobody_foresaw_is_dialled_again(kind: str) -> None:
    heard = asyncio.Event()
    peers, book = BrokenOnce(), ReportStore(ManualClock())
    peers.runs[TARGET].append(event(1))
    peers.pools[TARGET].append(environments_pb2.WatchPoolResponse(sequence=1))
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        followers = Followers(MemoryCluster(), book, peers, lambda *_: heard.set(), tasks)
        followers.follow(KEY._replace(kind=kind), ReportSource("uid"), TARGET, pod_uid="1")
        await heard.wait()
        followers.unfollow_all()


class Counting(MemoryRemoteClient):
    """Counts how often it was dialled."""

    dialled = 0

    @override
    async def watch_run(
        self, target: str, after: ReportPosition
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        self.dialled += 1
        async for response in MemoryRemoteClient.watch_run(self, target, after):
            yield response


async def test_what_the_controller_of_another_run_says_is_not_heard() -> None:
    peers, book = Counting(), ReportStore(ManualClock())
    others = event(1)
    others.run_uid = "another"
    peers.runs[TARGET].append(others)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        followers = Followers(MemoryCluster(), book, peers, lambda *_: None, tasks)
        followers.follow(KEY, ReportSource("uid"), TARGET, pod_uid="1")
        while peers.dialled < 3:  # noqa: ASYNC110 - seen as a reader sees it
            await asyncio.sleep(0)
        followers.unfollow_all()
    assert not book.run("uid").is_connected
    assert not book.run("uid").pending


async def test_a_controller_that_tells_without_end_is_heard_as_fast_as_it_is_dealt_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "MAX_UNACKNOWLEDGED", 3)
    peers, book = MemoryRemoteClient(), ReportStore(ManualClock())
    for sequence in range(1, 11):
        peers.runs[TARGET].append(event(sequence))
    told: list[int] = []
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        followers = Followers(MemoryCluster(), book, peers, lambda *_: None, tasks)
        followers.follow(KEY, ReportSource("uid"), TARGET, pod_uid="1")
        while told[-1:] != [10]:
            await asyncio.sleep(0)
            waiting = book.run("uid").pending
            assert len(waiting) <= 3
            told += [each.position.sequence for each in waiting]
            if waiting:
                book.acknowledge("uid", waiting[-1].position)
        followers.unfollow_all()
    assert told == list(range(1, 11))


@pytest.fixture
async def stalling(lab: Any, run_body: Any) -> Any:
    lab.cluster.upsert(run_body(deadlines={"stepProgressSeconds": 60}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    return lab


async def break_off(lab: Any, seconds: float) -> None:
    """The stream of reports breaks, and is opened anew a while later."""
    lab.book.record_disconnected(lab.run().metadata.uid)
    await lab.advance(seconds)


async def test_a_stream_that_breaks_and_comes_back_is_no_progress(stalling: Any) -> None:
    for _ in range(2):
        await break_off(stalling, 25)
        await stalling.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    assert stalling.run().status.attempt == 0
    await break_off(stalling, 25)
    await stalling.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    assert stalling.run().status.attempt == 1
    assert stalling.run().status.last_failure is None, "nothing ended by itself"


async def test_what_was_done_while_nobody_could_hear_it_is_progress(stalling: Any) -> None:
    await break_off(stalling, 100)
    await stalling.tell_event("Evaluated")  # told before the figures
    assert stalling.run().status.attempt == 0
    await stalling.say(state=run_pb2.RUN_STATE_RUNNING, step=6)
    await stalling.advance(50)
    assert stalling.run().status.attempt == 0


@pytest.mark.parametrize("count", ["completed", "masked", "dropped"])
async def test_a_rollout_that_comes_to_an_end_is_progress(stalling: Any, count: str) -> None:
    for number in range(1, 4):
        await stalling.advance(50)
        await stalling.say(
            state=run_pb2.RUN_STATE_RUNNING,
            step=5,
            rollouts=run_pb2.RolloutCounts(**{count: number}),
        )
    assert stalling.run().status.attempt == 0


async def test_another_controller_has_all_the_time_again(stalling: Any) -> None:
    await stalling.advance(50)
    stalling.new_controller()
    stalling.cluster.remove(Ref("Pod", "lab", "demo-trainer-0"))
    await stalling.settle()
    await stalling.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    await stalling.advance(50)
    assert stalling.run().status.attempt == 0
