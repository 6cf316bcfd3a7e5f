"""How long a swap may take: what hangs ends the engine, what only waits for requests does not."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.weights.followed_versions import assert_serves
from tests.support.weights.publishing import TrainedPolicy
from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import UnavailableError
from etude.common.weights import VersionId
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.status import ReplicaState, ReplicaStatus
from etude.inference.swap import deadlines
from etude.inference.swap.deadlines import MIN_PAUSE_LIMIT_S, PhaseLimits
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager

SECONDS = st.floats(0, 10_000)


class HangingRanks(MemoryRanks):
    """Ranks that never answer some call, or take a while for another."""

    hangs: str = ""
    slow: str = ""

    @override
    async def call(self, method: str, *args: object) -> Sequence[Any]:
        if method == self.hangs:
            self.calls.append(method)
            await asyncio.Event().wait()
        if method == self.slow:
            await asyncio.sleep(0.05)
        return await super().call(method, *args)


@dataclass(slots=True)
class BusyEngine(MemoryEngine):
    """Its requests end when they are told to; phases around a swap may hang."""

    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    drains: int = 0
    hangs: str = ""

    @override
    async def drain(self) -> None:
        self.drains += 1
        await self.may_end.wait()

    @override
    async def freeze(self) -> None:
        await MemoryEngine.freeze(self)
        await self._hang("freeze")

    @override
    async def thaw(self) -> None:
        await self._hang("thaw")
        await MemoryEngine.thaw(self)

    @override
    async def relabel(self, version: VersionId, *, drop_cache: bool) -> None:
        await self._hang("relabel")
        await MemoryEngine.relabel(self, version, drop_cache=drop_cache)

    async def _hang(self, phase: str) -> None:
        if self.hangs == phase:
            await asyncio.Event().wait()


@pytest.fixture
def engine(info: EngineInfo) -> BusyEngine:
    found = BusyEngine(info, HangingRanks(2))
    found.may_end.set()
    return found


@pytest.fixture
async def serving(
    engine: BusyEngine, store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> VersionFollower:
    """Version 0 is live, and version 1 is published."""
    receiver = VersionFollower(
        stager=Stager(store, "uid-run", tmp_path),
        engine=engine,
        status=ReplicaStatus(replica="r-0"),
    )
    policy.publish(store, 0, complete=True)
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 1)
    return receiver


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "FREEZE_LIMIT_S", 0.01)
    monkeypatch.setattr(deadlines, "MIN_PAUSE_LIMIT_S", 0.01)
    monkeypatch.setattr(deadlines, "SLACK", 0.0)


@pytest.fixture
def short_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "MIN_CONCURRENT_LIMIT_S", 1.0)
    monkeypatch.setattr(deadlines, "SLACK", 0.0)


async def test_requests_may_take_longer_to_end_than_anything_else_in_a_swap(
    serving: VersionFollower,
    engine: BusyEngine,
    policy: TrainedPolicy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "FREEZE_LIMIT_S", 0.05)
    engine.may_end.clear()
    catching_up = asyncio.create_task(serving.catch_up(), name="catch-up")
    await asyncio.sleep(0.5)
    assert (engine.failed, engine.live, engine.is_thawed) == ("", VersionId(1, 0), True)
    engine.may_end.set()
    await catching_up
    assert_serves(engine, policy, VersionId(1, 1))


async def test_requests_that_do_not_end_put_a_version_off_and_harm_nothing(
    serving: VersionFollower, engine: BusyEngine, policy: TrainedPolicy
) -> None:
    engine.swap.drain_s = 0.01
    engine.may_end.clear()
    for _ in range(5):
        with pytest.raises(UnavailableError, match=r"did not end within 0\.01 s"):
            await serving.catch_up()
    assert (engine.failed, engine.is_thawed, engine.drains) == ("", True, 6)
    assert (serving.status.state, serving.status.is_ready) == (ReplicaState.CATCHING_UP, True)
    engine.may_end.set()
    await serving.catch_up()
    assert_serves(engine, policy, VersionId(1, 1))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("phase", ["freeze", "relabel", "thaw"])
async def test_a_phase_around_a_swap_that_hangs_ends_the_engine(
    serving: VersionFollower, engine: BusyEngine, phase: str
) -> None:
    engine.hangs = phase
    await ends(serving, engine)


@pytest.mark.usefixtures("short")
async def test_a_rank_that_hangs_in_commit_ends_the_engine_and_is_not_told_to_undo(
    serving: VersionFollower, engine: BusyEngine
) -> None:
    assert isinstance(engine.ranks, HangingRanks)
    engine.ranks.hangs = "activate"
    await ends(serving, engine)
    assert "writing version 1.1" in engine.failed
    assert engine.ranks.calls[-1] == "activate"


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("call", ["undo", "scan"])
async def test_a_rank_that_hangs_in_undo_ends_the_engine(
    serving: VersionFollower, engine: BusyEngine, call: str
) -> None:
    assert isinstance(engine.ranks, HangingRanks)
    engine.ranks.fail["activate"] = 1
    engine.ranks.hangs = call
    await ends(serving, engine)
    assert "undoing version 1.1" in engine.failed


@pytest.mark.usefixtures("short_beside")
@pytest.mark.parametrize("call", ["prepare", "poll_prepared"])
async def test_a_rank_that_hangs_in_prepare_ends_the_engine(
    serving: VersionFollower, engine: BusyEngine, call: str
) -> None:
    assert isinstance(engine.ranks, HangingRanks)
    engine.ranks.hangs = call
    await ends(serving, engine, is_thawed=True)
    assert "preparing version 1.1" in engine.failed


@pytest.mark.usefixtures("short_beside")
@pytest.mark.parametrize("call", ["start_scan", "poll_scan"])
async def test_a_rank_that_hangs_in_an_audit_ends_the_engine(
    serving: VersionFollower, engine: BusyEngine, call: str
) -> None:
    assert isinstance(engine.ranks, HangingRanks)
    serving._auditor.every = 1
    engine.ranks.hangs = call
    await ends(serving, engine, is_thawed=True)
    assert "a scan of the live words" in engine.failed


async def test_what_is_prepared_for_a_caller_that_is_gone_is_asked_for_no_longer(
    serving: VersionFollower, engine: BusyEngine, policy: TrainedPolicy
) -> None:
    assert isinstance(engine.ranks, HangingRanks)
    engine.ranks.hangs = "poll_prepared"
    engine.ranks.calls.clear()
    catching_up = asyncio.create_task(serving.catch_up(), name="catch-up")
    while "poll_prepared" not in engine.ranks.calls:  # noqa: ASYNC110 - ranks tell nobody
        await asyncio.sleep(0.001)
    catching_up.cancel()
    await asyncio.wait({catching_up})
    engine.ranks.hangs = ""
    await serving.catch_up()
    assert_serves(engine, policy, VersionId(1, 1))
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "swap-phase"]


async def ends(receiver: VersionFollower, engine: BusyEngine, *, is_thawed: bool = False) -> None:
    """Nothing goes on, and the process is told why."""
    with pytest.raises(UnavailableError, match="took over"):
        await receiver.catch_up()
    assert "took over" in engine.failed
    assert engine.is_thawed == is_thawed
    assert receiver.status.state is ReplicaState.NOT_READY
    with pytest.raises(UnavailableError, match="took over"):
        await receiver.follow()


@pytest.mark.usefixtures("short")
async def test_a_hang_is_told_although_the_caller_is_gone(
    serving: VersionFollower, engine: BusyEngine
) -> None:
    assert isinstance(engine.ranks, HangingRanks)
    engine.ranks.hangs = "activate"
    engine.ranks.calls.clear()
    catching_up = asyncio.create_task(serving.catch_up(), name="catch-up")
    while "activate" not in engine.ranks.calls:  # noqa: ASYNC110 - ranks tell nobody
        await asyncio.sleep(0.001)
    catching_up.cancel()
    async with asyncio.timeout(30):
        while "took over" not in engine.failed:  # noqa: ASYNC110 - the swap tells only its caller
            await asyncio.sleep(0.001)
    assert not engine.is_thawed


async def test_what_ends_in_time_is_returned_and_its_error_raised() -> None:
    async def work(*, fails: bool) -> int:
        await asyncio.sleep(0)
        if fails:
            raise OSError("as it is")
        return 7

    assert await deadlines.run_within(10, work(fails=False), "it") == 7
    with pytest.raises(OSError, match="as it is"):
        await deadlines.run_within(10, work(fails=True), "it")


async def test_a_limit_is_kept_as_a_whole() -> None:
    async with asyncio.timeout(5):
        with pytest.raises(deadlines.HangsError, match="it took over 1 s"):
            await deadlines.run_within(1.0, asyncio.sleep(60), "it")


async def test_a_large_model_has_the_time_that_its_own_work_took(
    serving: VersionFollower,
    engine: BusyEngine,
    policy: TrainedPolicy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "MIN_PAUSE_LIMIT_S", 0.0)
    monkeypatch.setattr(deadlines, "SLACK", 1e9)
    assert engine.swap._limits.map_s > 0
    assert isinstance(engine.ranks, HangingRanks)
    engine.ranks.slow = "activate"
    await serving.catch_up()
    assert_serves(engine, policy, VersionId(1, 1))


async def test_a_process_that_was_stopped_for_longer_than_the_limit_has_not_hung() -> None:
    async def work() -> int:
        time.sleep(1.2)  # noqa: ASYNC251 - nothing of the process runs, as after a SIGSTOP
        await asyncio.sleep(0.01)
        return 7

    assert await deadlines.run_within(1.0, work(), "it") == 7


@given(prepares=st.lists(SECONDS, min_size=1), bake=SECONDS, loads=st.booleans())
def test_a_limit_is_never_below_the_pause_nor_below_what_was_measured(
    prepares: list[float], bake: float, *, loads: bool
) -> None:
    found = PhaseLimits(map_s=bake, uses_loader=loads)
    assert found.write_limit_s >= MIN_PAUSE_LIMIT_S
    for took_s in prepares:
        found.record_prepare(took_s)
    assert found.write_limit_s >= max(MIN_PAUSE_LIMIT_S, prepares[-1])
    assert found.undo_limit_s >= max(MIN_PAUSE_LIMIT_S, bake, *prepares)
    assert found.undo_limit_s >= found.write_limit_s


def test_a_small_version_of_a_model_that_is_mapped_has_the_shortest_limit() -> None:
    found = PhaseLimits(map_s=100.0)
    for took_s in (60.0, 0.3):
        found.record_prepare(took_s)
    assert found.write_limit_s == MIN_PAUSE_LIMIT_S
