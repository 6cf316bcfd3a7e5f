"""Versions on their way that are refused, killed or overtaken: none of their steps is lost."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.stores.store_faults import Fault
from tests.support.trainer.store_outages import (
    RL_STEPS,
    SFT_STEPS,
    STARTED,
    Unsteady,
    assert_whole,
    asynchronous,
    away_after,
    chain,
    replace_learners,
    stalled,
    steps,
)
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.common import store_retry, weights
from etude.common.errors import FencedError, StoreError
from etude.common.weights import VersionId, claim_epoch, quarantine, read_manifest
from etude.trainer.compactor.report import CompactorClient, CompactorFailure, CompactorReport
from etude.trainer.compactor.schedule import EMPTY
from etude.trainer.controller.publishing.engines import Engines, VersionRefusedError
from etude.trainer.controller.run import Run, root_cause

MakeWorld = Callable[..., Any]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_retry, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(store_retry, "LONGEST_PAUSE_S", 0.05)


@dataclass
class Refusing(Engines):
    """Refuses the versions of some steps, once."""

    steps: set[int] = field(default_factory=set)
    store: Any = None
    refused: list[VersionId] = field(default_factory=list)

    @override
    async def activate(self, version: VersionId) -> None:
        step = read_manifest(self.store, version).step - SFT_STEPS
        if step in self.steps:
            self.steps.remove(step)
            self.refused.append(version)
            raise VersionRefusedError(f"version {version}: state differs")

    @override
    async def roll_back(self, version: VersionId) -> None:
        pass


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_version_that_is_refused_takes_those_behind_it_along_and_no_step_is_lost(
    make_world: MakeWorld, step: int
) -> None:
    world = asynchronous(make_world, 2)
    engines = Refusing((), timeout_s=1.0, steps={step}, store=world.store)
    prepare_store = away_after(world, 1)

    def prepare(run: Run) -> None:
        run.publishing.engines = engines
        prepare_store(run)

    training = asyncio.create_task(world.train(prepare))
    run = await stalled(world)
    world.store.away(is_away=False)
    assert await training
    assert weights.list_quarantined(world.store) == set(engines.refused)
    assert run.progress.epoch == 2
    manifests = chain(world)
    anew = next(m for m in manifests if m.epoch == 2)
    # What was encoded behind it is in the complete one: it had not been offered to anybody.
    assert anew.is_complete
    # For each that was served before the refusal the trainer took one more step.
    assert 3 <= anew.step - SFT_STEPS < 3 + step
    assert steps([m for m in manifests if m.epoch == 1]) == list(range(step))
    assert_whole(world)


async def test_versions_whose_base_is_refused_are_published_complete(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 2)
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    quarantine(world.store.inner, STARTED, reason="test")
    world.store.away(is_away=False)
    assert await training
    assert run.progress.epoch == 1
    found = chain(world)
    assert [m.number for m in found if m.is_complete] == [0, STARTED.number + 1]
    assert steps(found)[:2] == [0, 3]
    assert_whole(world)


class CutOff(CompactorClient):
    """A compactor that never gets on, whatever is published."""

    report = CompactorReport(
        chain=EMPTY,
        is_overdue=False,
        cut_off_at=STARTED,
        written=(),
        collected=0,
        failures=(CompactorFailure("follow", "blake3"),),
    )

    @override
    async def run_round(self, epoch: int) -> CompactorReport:
        return self.report


async def test_a_setback_of_a_broken_chain_is_mended_by_one_complete_version(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 2)
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    run.publishing.compaction.client, run.publishing.compaction.last = CutOff(), CutOff.report
    quarantine(world.store.inner, STARTED, reason="test")
    world.store.away(is_away=False)
    assert await training
    assert [m.number for m in chain(world) if m.is_complete] == [0, STARTED.number + 1]
    told = [row for row in world.rows("event") if row["reason"] == "ChainBroken"]
    assert len(told) == 1
    assert_whole(world)


@dataclass(slots=True)
class Dying(SimulatedLearners):
    """Dies between a payload and its manifest."""

    at: int = -1

    @override
    async def upload(self, version: VersionId) -> None:
        await SimulatedLearners.upload(self, version)
        if version.number == self.at:
            raise ConnectionError("a simulated learner died")


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("every_steps", [2, 100])
async def test_a_kill_between_payload_and_manifest_loses_nothing(
    make_world: MakeWorld, number: int, every_steps: int
) -> None:
    world = asynchronous(make_world, 2)
    world.spec["checkpointing"]["everySteps"] = every_steps

    def prepare(run: Run) -> None:
        replace_learners(run, Dying(world.store, at=number))

    with pytest.raises(ExceptionGroup) as caught:
        await world.train(prepare)
    assert isinstance(root_cause(caught.value), ConnectionError)
    lost = VersionId(1, number)
    assert lost not in weights.accepted_chain(world.store)
    assert [*world.store.list(f"weights/deltas/000001/{number:012d}/")]
    assert await world.train()
    assert world.runs[-1].progress.epoch == 2
    assert lost not in weights.accepted_chain(world.store)
    assert_whole(world)


async def test_a_kill_while_the_store_is_away_resumes_from_what_it_holds(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 2)
    training = asyncio.create_task(world.train(away_after(world, 1)))
    await stalled(world)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    world.store.away(is_away=False)
    assert await world.train()
    assert_whole(world)


async def test_a_successor_ends_a_trainer_whose_versions_are_on_their_way(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 2)
    training = asyncio.create_task(world.train(away_after(world, 1)))
    await stalled(world)
    claim_epoch(world.store.inner, holder="other", parent=STARTED, reason="takeover")
    world.store.away(is_away=False)
    with pytest.raises(ExceptionGroup) as caught:
        await training
    assert isinstance(root_cause(caught.value), FencedError)
    assert chain(world)[-1].version == STARTED


async def test_a_store_that_stays_away_ends_the_process(make_world: MakeWorld) -> None:
    world = asynchronous(make_world, 2)
    prepare_store = away_after(world, 1)

    def prepare(run: Run) -> None:
        prepare_store(run)
        run.book.journal.store_retry.limit_s = run.publishing.upload_retry.limit_s = 1.0

    with pytest.raises(ExceptionGroup) as caught:
        await world.train(prepare)
    assert isinstance(root_cause(caught.value), StoreError)


async def test_a_run_in_step_with_its_engines_is_the_same_with_any_backlog(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    found = []
    for backlog in (0, 8):
        world = make_world()
        world.spec["weights"]["advanced"]["backlog"] = backlog
        assert await world.train()
        assert world.digest == uninterrupted
        manifests = {
            key: data
            for key, data in world.store.objects.items()
            if key.startswith("weights/manifests/")
        }
        rows = [(r["global_step"], r.get("policy_version")) for r in world.rows("step")]
        found.append((manifests, rows))
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(6))
async def test_faults_and_kills_in_any_order_leave_a_whole_chain(
    make_world: MakeWorld, seed: int
) -> None:
    rates = {Fault.UNAVAILABLE: 0.1, Fault.LOST_REPLY: 0.05, Fault.RESET: 0.05}
    store = Unsteady(seed=seed, rates=rates)
    world = asynchronous(make_world, backlog=seed % 4, store=store)
    world.spec["checkpointing"]["everySteps"] = 2
    await world.crash(after=SFT_STEPS + random.Random(seed).randrange(1, RL_STEPS))
    await world.crash(after=0)
    assert await world.train()
    assert steps(chain(world))[-1] == RL_STEPS
    assert_whole(world)
