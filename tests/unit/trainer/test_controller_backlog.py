"""Versions that wait for a store that is away: so many and no more, all of them in the end."""

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.faults import Fault, FaultyStore, Schedule
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.checkpoints import stored
from etude.common.errors import FencedError, StoreError
from etude.common.weights import VersionId, WeightManifest, claim_epoch, quarantine, read_manifest
from etude.trainer.batches import NonFiniteLossError, PolicyBatch, StepResult
from etude.trainer.controller import patience
from etude.trainer.controller.engines import Engines, VersionRefusedError
from etude.trainer.controller.run import Run, root_cause
from etude.trainer.simulation import SimulatedLearners

SFT_STEPS = 4
RL_STEPS = 6
STALENESS = 4

STARTED = VersionId(1, 1)
"""With which the second phase begins; the one before is of the initial weights."""

MakeWorld = Callable[..., Any]


class Unsteady(FaultyStore):
    """A store in memory that can be away."""

    inner: MemoryStore

    def __init__(self, *, seed: int = 0, rates: dict[Fault, float] | None = None) -> None:
        def hits(call: str, key: str) -> bool:
            # Chance spares what has no patience: taking over, and checkpoints.
            is_patient = key.startswith(("weights/deltas/", "weights/manifests/", "journal/"))
            if rates is None:
                return key.startswith(self.only)
            return is_patient and call in {"put", "create"}

        self.only = ""
        super().__init__(MemoryStore(), Schedule(seed=seed, rates=rates, hits=hits))

    @property
    def objects(self) -> dict[str, bytes]:
        return self.inner.objects

    def away(self, *, is_away: bool) -> None:
        self.faults.down(is_down=is_away)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 0.05)


def asynchronous(make_world: MakeWorld, backlog: int, store: Unsteady | None = None) -> Any:
    """A world whose run pauses for nothing but its end, and may be far ahead of its engines."""
    given = make_world(staleness=STALENESS, every_steps=100).spec
    given["evaluation"] = []
    given["weights"]["advanced"] = {"backlog": backlog, "retainVersions": 200}
    return make_world(store or Unsteady(), given=given)


def learner_of(run: Run) -> SimulatedLearners:
    assert isinstance(run.learners, SimulatedLearners)
    return run.learners


def away_after(world: Any, step: int) -> Callable[[Run], None]:
    """The store is away from the end of a step of the second phase on."""

    def prepare(run: Run) -> None:
        def after_step() -> None:
            if len(learner_of(run).trained) == SFT_STEPS + step:
                world.store.away(is_away=True)

        learner_of(run).after_step = after_step

    return prepare


async def stalled(world: Any) -> Run:
    """The run, once it waits for its store."""
    seen = -1
    while True:
        await asyncio.sleep(0.3)
        if world.runs and world.store.faults._is_down:
            run: Run = world.runs[-1]
            if len(learner_of(run).trained) == seen:
                return run
            seen = len(learner_of(run).trained)


def chain(world: Any) -> list[WeightManifest]:
    return [read_manifest(world.store, v) for v in weights.accepted_chain(world.store)]


def steps(found: list[WeightManifest]) -> list[int]:
    """Of the second phase, of which versions are."""
    return [m.step - SFT_STEPS for m in found if m.number >= STARTED.number]


def assert_whole(world: Any) -> None:
    """Every manifest names the one before it, and the last one holds the learner's weights."""
    found = chain(world)
    for before, after in itertools.pairwise(found):
        assert after.base in {before.ref, None}
        assert after.number > before.number
    run = world.runs[-1]
    assert found[-1].version == VersionId(*run.cursor.policy)
    words = learner_of(run).words
    assert found[-1].state == weights_state(words)
    assert world.audit(max_staleness=STALENESS).findings == []


def weights_state(words: Any) -> str:
    from etude.common.weights.tensors import digest  # noqa: PLC0415 - compiled when it is needed

    return digest.scan(words, 0).hex()


@pytest.mark.parametrize("backlog", [0, 1, 2, 3])
async def test_a_trainer_without_its_store_takes_as_many_steps_as_its_backlog_holds(
    make_world: MakeWorld, backlog: int
) -> None:
    world = asynchronous(make_world, backlog)
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    trained = len(learner_of(run).trained) - SFT_STEPS
    assert trained == 1 + backlog
    assert len(run.in_flight) == 1 + backlog
    assert len(learner_of(run).publisher.waiting) == 1 + backlog
    # Nothing of it is said to exist.
    assert run.cursor.policy == STARTED
    assert run.served == STARTED
    run.report()
    assert run.reports.status.reason == StoreError.reason
    assert run.reports.status.policy_version == STARTED.number
    world.store.away(is_away=False)
    assert await training
    assert steps(chain(world)) == list(range(RL_STEPS + 1))
    assert all(m.base is not None for m in chain(world)[1:])
    assert_whole(world)
    assert len(run.in_flight) == 0
    assert not learner_of(run).publisher.waiting


async def test_no_version_is_seen_before_the_batches_that_led_to_it_are_durable(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 2)
    world.store.only = "journal/"
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    # The batch of the first step was durable; nobody may see what came after it.
    assert steps(chain(world))[-1] == 1
    assert len(run.in_flight) == 3
    assert len(learner_of(run).trained) == SFT_STEPS + 4
    world.store.away(is_away=False)
    assert await training
    assert steps(chain(world)) == list(range(RL_STEPS + 1))
    assert_whole(world)


async def test_a_run_ends_in_order_if_its_store_is_away_at_the_last_step(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 2)
    training = asyncio.create_task(world.train(away_after(world, RL_STEPS)))
    run = await stalled(world)
    assert not training.done()
    world.store.away(is_away=False)
    assert await training
    assert chain(world)[-1].step == run.cursor.global_step == SFT_STEPS + RL_STEPS
    assert_whole(world)


async def test_a_run_that_is_told_to_stop_saves_a_checkpoint_of_its_newest_version(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 3)
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    run.orders.stop()
    await asyncio.sleep(0.2)
    assert not training.done()
    world.store.away(is_away=False)
    assert not await training
    assert chain(world)[-1].step == run.cursor.global_step == run.saver.last_step
    assert await world.train()
    assert_whole(world)


async def test_checkpoints_and_evaluations_are_of_the_version_of_their_step(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 8)
    world.spec["checkpointing"]["everySteps"] = 3
    world.spec["evaluation"] = make_world().spec["evaluation"]
    world.spec["evaluation"][0]["everySteps"] = 2
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    # Nothing is in flight when an evaluation begins.
    assert len(learner_of(run).trained) == SFT_STEPS + 2
    world.store.away(is_away=False)
    assert await training
    assert [row["step"] for row in world.rows("eval")] == [0, 2, 4, 6]
    at = {m.step: m.number for m in chain(world)}
    for found in stored(world.store, run="run"):
        if found.manifest.step > SFT_STEPS:
            assert found.manifest.policy_version == at[found.manifest.step]
    assert_whole(world)


@dataclass(slots=True)
class Diverging(SimulatedLearners):
    """Has no third step in the second phase."""

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        if len(self.trained) == SFT_STEPS + 2:
            raise NonFiniteLossError("the loss is NaN")
        return await SimulatedLearners.policy_step(self, batch)


async def test_a_run_that_fails_for_good_publishes_what_was_good(make_world: MakeWorld) -> None:
    world = asynchronous(make_world, 2)

    def prepare(run: Run) -> None:
        run.learners = run.saver.learners = Diverging(world.store)
        away_after(world, 1)(run)

    training = asyncio.create_task(world.train(prepare))
    await stalled(world)
    assert weights.newest(world.store.inner) == STARTED
    world.store.away(is_away=False)
    with pytest.raises(ExceptionGroup) as caught:
        await training
    assert isinstance(root_cause(caught.value), NonFiniteLossError)
    assert steps(chain(world)) == [0, 1, 2]


@dataclass
class Refusing(Engines):
    """Refuses the versions of some steps, once."""

    steps: set[int] = field(default_factory=set)
    store: Any = None
    refused: list[VersionId] = field(default_factory=list)

    @override
    async def commit(self, version: VersionId) -> None:
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
        run.engines = engines
        prepare_store(run)

    training = asyncio.create_task(world.train(prepare))
    run = await stalled(world)
    world.store.away(is_away=False)
    assert await training
    assert weights.quarantined(world.store) == set(engines.refused)
    assert run.epoch == 2
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
    assert run.epoch == 1
    found = chain(world)
    assert [m.number for m in found if m.is_complete] == [0, STARTED.number + 1]
    assert steps(found)[:2] == [0, 3]
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
        run.learners = run.saver.learners = Dying(world.store, at=number)

    with pytest.raises(ExceptionGroup) as caught:
        await world.train(prepare)
    assert isinstance(root_cause(caught.value), ConnectionError)
    lost = VersionId(1, number)
    assert lost not in weights.accepted_chain(world.store)
    assert [*world.store.list(f"weights/deltas/000001/{number:012d}/")]
    assert await world.train()
    assert world.runs[-1].epoch == 2
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
        run.book.journal.patience.limit_s = run.uploading.limit_s = 1.0

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
