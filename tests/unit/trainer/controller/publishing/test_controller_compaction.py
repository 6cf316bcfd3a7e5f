"""A run with its compactor: short chains, little in the store, and no step that waits for it."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.stores.store_faults import FaultyStore, Schedule
from tests.support.trainer_simulation import weights as simulation_weights
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.common import weights
from etude.common.checkpoints.manifest import (
    CheckpointManifest,
    CheckpointObject,
    stored_checkpoints,
)
from etude.common.errors import FencedError
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.replicas.mirror import Mirror
from etude.trainer.compactor.report import CompactorClient, CompactorFailure, CompactorReport
from etude.trainer.compactor.schedule import EMPTY, ChainState
from etude.trainer.controller.checkpoints.saver import chain_keyframe
from etude.trainer.controller.publishing import compaction
from etude.trainer.controller.publishing.compaction import CompactionMonitor
from etude.trainer.controller.run import Run
from etude.trainer.learner.batches import PolicyBatch, StepResult

MakeWorld = Callable[..., Any]

WEIGHTS = {
    "dtype": "Float32",
    "keyframeEverySteps": 2,
    "advanced": {"retainVersions": 2, "retainKeyframes": 1, "skips": [2]},
}


def keep_newest_checkpoint(store: Any) -> None:
    """As the operator does."""
    folders = sorted({key.split("/")[1] for key in store.objects if key.startswith("checkpoints/")})
    for folder in folders[:-1]:
        store.delete([key for key in store.objects if key.startswith(f"checkpoints/{folder}/")])


async def test_a_run_ends_with_keyframes_and_a_collected_store(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "TICK_S", 0.0)
    world = make_world(weights=WEIGHTS)
    assert await world.train()
    run = world.runs[0]
    keep_newest_checkpoint(world.store)
    assert await run.publishing.compaction.run_round()
    assert await run.publishing.compaction.run_round()
    found = take_listing(world.store)
    newest = weights.newest_version(world.store)
    assert newest == VersionId(1, run.publishing.next_version - 1)
    assert found.keyframes
    assert len(found.payloads) < run.publishing.next_version - 2
    checkpoint = next(k for k in world.store.objects if k.endswith("/manifest.json"))
    named = VersionId(1, json.loads(world.store.get(checkpoint))["policy_version"])
    Mirror(world.store, tmp_path / "resumed").move_to(named)
    reader = Mirror(world.store, tmp_path / "newest")
    reader.move_to(newest)
    learners = run.learners
    assert isinstance(learners, SimulatedLearners)
    assert reader.tensor_words[simulation_weights.SCHEMA.tensors[0].name].tobytes() == (
        learners.words.tobytes()
    )


def report_of(
    chain: ChainState, *failures: CompactorFailure, cut_off_at: VersionId | None = None
) -> CompactorReport:
    return CompactorReport(
        chain,
        is_overdue=False,
        cut_off_at=cut_off_at,
        written=(),
        collected=0,
        failures=failures,
    )


@dataclass
class Broken(CompactorClient):
    """A compactor whose process dies at every round."""

    rounds: int = 0

    @override
    async def run_round(self, epoch: int) -> CompactorReport:
        self.rounds += 1
        raise ConnectionError("the actor died")


async def test_a_dead_compactor_is_reported_and_stops_nothing(
    make_world: MakeWorld, uninterrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "TICK_S", 0.0)
    monkeypatch.setattr(compaction, "REST_S", 0.0)
    world = make_world(weights=WEIGHTS)
    broken = Broken()

    def prepare(run: Run) -> None:
        run.publishing.compaction.client = broken

    assert await world.train(prepare)
    assert world.digest == uninterrupted
    run = world.runs[0]
    assert broken.rounds > 1
    run.reporter.update_status()
    status = run.reporter.status
    assert status.reason == "KeyframeOverdue"
    assert "one is due every 2: ConnectionError: the actor died" in status.message
    run.publishing.compaction.last = report_of(
        EMPTY._replace(newest=VersionId(1, run.publishing.next_version - 1))
    )
    run.reporter.update_status()
    assert (status.reason, status.message) == ("", "")


async def test_a_store_that_is_away_is_said_before_a_late_keyframe(make_world: MakeWorld) -> None:
    run, _, _ = make_world(weights=WEIGHTS).start()
    run.publishing.next_version = 9
    run.publishing.store_retry.refusal.record("no route to host")
    run.reporter.update_status()
    assert run.reporter.status.reason == "StorageUnavailable"
    run.publishing.store_retry.refusal.clear()
    run.reporter.update_status()
    assert run.reporter.status.reason == "KeyframeOverdue"


@dataclass
class Unlucky(CompactorClient):
    """A compactor that comes to one version only after the store damaged it."""

    keeping: CompactorClient
    store: Any
    number: int
    is_damaged: bool = False
    reports: list[CompactorReport] = field(default_factory=list)

    @override
    async def run_round(self, epoch: int) -> CompactorReport:
        prefix = f"weights/deltas/000001/{self.number:012d}/"
        for info in self.store.list(prefix) if not self.is_damaged else ():
            data = self.store.objects[info.key]
            self.store.objects[info.key] = bytes([data[0] ^ 1]) + data[1:]
            self.is_damaged = True
        self.reports.append(await self.keeping.run_round(epoch))
        return self.reports[-1]


async def test_a_version_that_nobody_can_read_any_more_is_followed_by_a_complete_one(
    make_world: MakeWorld, uninterrupted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "REST_S", 0.0)
    world = make_world(weights={"dtype": "Float32", "advanced": {"backlog": 2}})
    found: list[Unlucky] = []

    def prepare(run: Run) -> None:
        found.append(Unlucky(run.publishing.compaction.client, world.store, number=2))
        run.publishing.compaction.client = found[0]
        step = run.learners.policy_step

        async def slowly(batch: PolicyBatch) -> StepResult:
            await run.publishing.compaction.run_round()  # the compactor sees every version
            return await step(batch)

        monkeypatch.setattr(run.learners, "policy_step", slowly)

    assert await world.train(prepare)
    assert world.digest == uninterrupted
    assert found[0].is_damaged
    assert any(report.cut_off_at for report in found[0].reports)
    told = [row for row in world.rows("event") if row["reason"] == "ChainBroken"]
    assert len(told) == 1
    assert "blake3" in told[0]["message"]
    newest = weights.newest_version(world.store)
    assert newest is not None
    reader = Mirror(world.store, tmp_path / "fresh")
    kinds = [edge.kind for edge in reader.move_to(newest)]
    assert kinds[0] == "complete"
    assert (await found[0].run_round(1)).cut_off_at is None


def test_a_complete_version_that_does_not_help_is_not_followed_by_one_after_the_other() -> None:
    mine = over(Counting())
    follow, other = CompactorFailure("follow", "blake3"), CompactorFailure("collect", "slow down")
    asked = []
    for number in range(1, 350):
        mine.last = report_of(EMPTY, other, follow, cut_off_at=VersionId(1, number))
        if mine.chain_break():
            assert mine.chain_break() == "blake3"
            asked.append(number)
            mine.note_complete_version(number + 1)
    assert asked == [1, 102, 203, 304]


def test_what_the_compactor_did_not_see_yet_may_have_mended_the_chain() -> None:
    mine = over(Counting())
    mine.last = report_of(EMPTY, CompactorFailure("follow", "blake3"), cut_off_at=VersionId(1, 7))
    assert mine.chain_break()
    mine.note_complete_version(9)
    assert not mine.chain_break()
    mine.last = report_of(EMPTY)
    assert not mine.chain_break()


@dataclass
class Counting(CompactorClient):
    """Does nothing, at most so often; then a newer epoch is open."""

    rounds: int = 0
    most: int = 1000
    is_done: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    async def run_round(self, epoch: int) -> CompactorReport:
        self.rounds += 1
        if self.rounds > self.most and epoch == 1:
            self.is_done.set()
            raise FencedError("epoch 2 was opened")
        return report_of(EMPTY)


EPOCH_2 = weights.EpochRecord(
    epoch=2,
    parent_epoch=1,
    parent_number=7,
    first_number=9,
    reason="rollback",
    holder="t",
    nonce="n",
)


def over(keeping: CompactorClient) -> CompactionMonitor:
    return CompactionMonitor(client=keeping, epoch=1, versions=100, first=0)


async def ran_until_fenced(keeping: Counting, upkeep: CompactionMonitor) -> "asyncio.Task[None]":
    task = asyncio.create_task(upkeep.run(lambda: 1), name="upkeep")
    async with asyncio.timeout(10):
        await keeping.is_done.wait()
    for _ in range(20):
        await asyncio.sleep(0.001)
    return task


async def test_a_fenced_compactor_is_not_asked_again_until_its_controller_opens_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compaction, "TICK_S", 0.0)
    keeping = Counting(most=0)
    mine = over(keeping)
    task = await ran_until_fenced(keeping, mine)
    assert keeping.rounds == 1
    mine.begin_epoch(EPOCH_2)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert keeping.rounds == 2
    task.cancel()
    assert mine.first == 9


async def test_there_are_rounds_where_nothing_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compaction, "TICK_S", 0.001)
    monkeypatch.setattr(compaction, "IDLE_S", 0.01)
    keeping = Counting(most=3)
    task = await ran_until_fenced(keeping, over(keeping))
    task.cancel()
    assert keeping.rounds == 4


async def test_a_checkpoint_says_where_the_chain_to_its_version_begins(
    make_world: MakeWorld,
) -> None:
    world = make_world(weights={"dtype": "Float32", "advanced": {"chainRatio": "1000"}})
    assert await world.train()
    store = world.store
    found = list(stored_checkpoints(store, run="run"))
    assert [chain_keyframe(store, each.manifest) for each in found] == [0] * len(found)
    told = [
        each.checkpoint
        for each in world.runs[0].reporter.reports._happenings
        if each.checkpoint.uri
    ]
    assert {(each.HasField("keyframe"), each.keyframe) for each in told} == {(True, 0)}
    store.delete([info.key for info in store.list("weights/deltas/000001/000000000000/")])
    assert chain_keyframe(store, found[-1].manifest) is None


def test_a_store_that_is_away_leaves_a_chain_unknown(make_world: MakeWorld) -> None:
    run, _, _ = make_world().start()
    faults = Schedule()
    faults.down(is_down=True)
    item = CheckpointObject(key="x", size=1, blake3="0" * 64)
    manifest = CheckpointManifest(
        run="run",
        step=1,
        phase="rl",
        phase_step=1,
        epoch=1,
        policy_version=1,
        reason="Scheduled",
        objects=[item],
    )
    assert chain_keyframe(FaultyStore(run.store, faults), manifest) is None
