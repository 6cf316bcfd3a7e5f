"""Records of rollouts that go on: their times, versions that were rolled back, and deletion."""

import asyncio
import time

import pytest

from etude.agent.completions import Completion, FinishReason
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.trajectory import PolicySpan
from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId
from etude.trainer.rollouts.trajectories import recorder as recorder_module
from etude.trainer.rollouts.trajectories.log import KEEP_S, TrajectoryLog
from etude.trainer.rollouts.trajectories.recorded_rollout import Place, RecordedRollout
from etude.trainer.rollouts.trajectories.recorder import RolloutRecorder
from etude.trainer.rollouts.trajectories.rollback import Rollback
from etude.v1 import environments_pb2

LEASE = environments_pb2.Lease(lease_id="lease")
CALL = ToolCall("0.0", "read_file", "{}")


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(recorder_module, "time", made)
    return made


class Lost:
    """Seconds that an attempt lost."""

    seconds = 0.0


def record(log: TrajectoryLog, rollout: RecordedRollout, lost: Lost, name: str) -> RolloutRecorder:
    return RolloutRecorder(
        log=log,
        rollout_id=name,
        group_id="rl-000001",
        index=0,
        place=Place(1, 0, 0),
        rollout=rollout,
        lost_s=lambda: lost.seconds,
        is_continued=False,
    )


def completion(*versions: VersionId) -> Completion:
    spans = [PolicySpan(at, at + 1, each, each) for at, each in enumerate(versions)]
    return Completion([5] * len(versions), [-0.5] * len(versions), spans, FinishReason.STOP)


def test_time_that_was_lost_before_the_start_is_not_granted_again(clock: Clock) -> None:
    lost = Lost()
    made = record(TrajectoryLog.of_run(MemoryStore(), "run"), RecordedRollout(), lost, "r")
    clock.now_s, lost.seconds = 130.0, 30.0  # an environment was rebuilt, which was lost
    made.start(LEASE)
    clock.now_s, lost.seconds = 150.0, 35.0
    assert made.active_s == 15.0


def test_turns_of_a_version_that_was_rolled_back_are_cut_off_with_their_environment() -> None:
    made = record(TrajectoryLog.of_run(MemoryStore(), "run"), RecordedRollout(), Lost(), "r")
    made.start(LEASE)
    good, left = VersionId(1, 3), VersionId(1, 4)
    for versions in ([good, good], [good, left], [left]):
        made.add_turn([1, 2], completion(*versions), 0.1)
        made.add_results([CALL], [ToolOutcome(content="")], 0.1)
    rollback = Rollback(epoch=2, newest=3)
    cut = made.rollout.cut_abandoned([rollback])
    assert [len(turn.token_ids) for turn in cut.turns] == [2]
    assert len(cut.results) == 1
    assert cut.lease is None
    assert made.rollout.cut_abandoned([Rollback(epoch=1, newest=3)]) is made.rollout
    assert not made.rollout.cut_abandoned([Rollback(epoch=2, newest=-1)]).turns


async def test_records_of_a_dropped_rollout_do_not_keep_those_of_others() -> None:
    store = MemoryStore()
    log = TrajectoryLog.of_run(store, "run")
    writing = asyncio.create_task(log.run())
    dropped = record(log, RecordedRollout(), Lost(), "dropped")
    dropped.start(LEASE)
    await log.wait_durable()
    running = record(log, RecordedRollout(), Lost(), "running")
    running.start(LEASE)
    await log.wait_durable()
    before = {info.key for info in store.list("trajectories/")}
    log.note_drop("dropped")
    dropped.add_turn([1], completion(VersionId(1, 1)), 0.1)  # its cancellation is on its way
    log.note_drop("unknown")
    await log.cut(now_s=time.monotonic() + KEEP_S + 1)
    after = {info.key for info in store.list("trajectories/")}
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert len(before) == 2
    assert after == {max(before)}
