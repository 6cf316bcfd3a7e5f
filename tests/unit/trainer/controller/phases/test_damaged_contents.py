"""A rollout whose tokens are gone or damaged is left out, counted, and left out by successors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.trainer.store_outages import replace_learners
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.common.api.run.phases import inherit_context
from etude.common.blobs import MemoryStore
from etude.common.role_inputs import ResolvedRun
from etude.common.weights import VersionId
from etude.trainer.controller.phases.guards import InfraFailuresError
from etude.trainer.controller.run import Run, root_cause
from etude.trainer.export.receipts import PublishBase, RankReceipt
from etude.trainer.learner.batches import PolicyBatch, StepResult
from etude.trainer.rescoring.recorded_groups import read_trained_groups
from etude.v1.rollout_content_pb2 import RolloutContent

MakeWorld = Callable[..., Any]
Change = Callable[[MemoryStore, str], None]
SFT_STEPS = 4
SPOILT = 3
"""Policy step whose batch has rollouts that cannot be read."""


def lose(store: MemoryStore, key: str) -> None:
    store.objects.pop(key, None)


def alter(store: MemoryStore, key: str) -> None:
    store.objects[key] = bytes(len(store.objects[key]))


def cut(store: MemoryStore, key: str) -> None:
    store.objects[key] = store.objects[key][:-1]


@dataclass(slots=True)
class SpoiltLearners(SimulatedLearners):
    """Whose store spoils the first rollouts of one batch, just before it is read.

    It fetches none ahead of their step.
    """

    change: Change = lose
    count: int = 1
    is_repaired: bool = False
    """True if the objects are whole again after the batch was refused."""
    spoilt: dict[str, bytes] = field(default_factory=dict)

    @override
    def fetch_contents(self, references: Sequence[bytes], steps: int) -> None:
        """Leave them to their step."""

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        store = self.store
        assert isinstance(store, MemoryStore)
        if self.spoilt and self.is_repaired:
            store.objects.update(self.spoilt)
        if len(self.trained) == SFT_STEPS + SPOILT - 1 and not self.spoilt:
            for each in batch.stored[: self.count]:
                key = RolloutContent.FromString(each.content).tokens.key
                self.spoilt[key] = store.objects[key]
                self.change(store, key)
        return await SimulatedLearners.policy_step(self, batch)


def spoil(**fields: Any) -> Callable[[Run], None]:
    return lambda run: replace_learners(run, SpoiltLearners(run.store, **fields))


def assert_one_was_left_out(world: Any) -> None:
    account = world.audit(max_staleness=0)
    assert account.findings == []
    assert account.dropped["damaged"] == 1
    rows = world.rows("step")
    assert [row["masked"] for row in rows if row["phase"] == "rl"] == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("change", [lose, alter, cut])
async def test_the_batch_is_trained_without_it_and_the_run_goes_on(
    make_world: MakeWorld, change: Change
) -> None:
    world = make_world()
    assert await world.train(spoil(change=change))
    assert_one_was_left_out(world)
    assert world.runs[-1].book.ledger.masked == 1
    [event] = [row for row in world.rows("event") if row["reason"] == "RolloutsDamaged"]
    assert "1 left out of step 3: rl-" in event["message"]
    assert "contents/rl-" in event["message"]


async def test_a_successor_leaves_it_out_too_though_it_is_whole_again(
    make_world: MakeWorld,
) -> None:
    undisturbed = make_world(every_steps=100)
    assert await undisturbed.train(spoil())
    world = make_world(every_steps=100)

    def prepare(run: Run) -> None:
        learners = SpoiltLearners(run.store, is_repaired=True, steps_until_crash=SFT_STEPS + 4)
        replace_learners(run, learners)

    with pytest.raises(ExceptionGroup):
        await world.train(prepare)
    assert await world.train()
    assert_one_was_left_out(world)
    assert world.digest == undisturbed.digest


async def test_a_successor_that_cannot_read_what_its_predecessor_trained_goes_on_without_it(
    make_world: MakeWorld,
) -> None:
    world = make_world(every_steps=100)
    await world.crash(after=SFT_STEPS + 4)
    first = next(key for key in sorted(world.store.objects) if key.startswith("contents/rl-"))
    lose(world.store, first)
    assert await world.train()
    account = world.audit(max_staleness=0)
    assert account.findings == []
    assert account.dropped["damaged"] == 1


@dataclass(slots=True)
class ComparingLearners(SimulatedLearners):
    """Whose batches name, as current, versions with exactly the weights of the step."""

    published: dict[VersionId, str] = field(default_factory=dict)
    """Weights of each version, of earlier controllers too."""
    compared: list[VersionId] = field(default_factory=list)

    @override
    async def encode(self, version: VersionId, base: PublishBase | None) -> list[RankReceipt]:
        self.published[version] = self.weights
        return await SimulatedLearners.encode(self, version, base)

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        self.compared += batch.current
        assert {self.published[each] for each in batch.current} <= {self.weights}
        return await SimulatedLearners.policy_step(self, batch)


@pytest.mark.parametrize("num_lost", [0, 1])
async def test_versions_that_trained_what_is_left_out_now_are_not_taken_for_the_learners_weights(
    make_world: MakeWorld, num_lost: int
) -> None:
    world, published = make_world(every_steps=100), dict[VersionId, str]()
    learners: list[ComparingLearners] = []

    def prepare(run: Run) -> None:
        crash = -1 if learners else SFT_STEPS + 4
        learners.append(ComparingLearners(run.store, published=published, steps_until_crash=crash))
        replace_learners(run, learners[-1])

    with pytest.raises(ExceptionGroup):
        await world.train(prepare)
    keys = [key for key in sorted(world.store.objects) if key.startswith("contents/rl-")]
    for key in keys[:num_lost]:
        lose(world.store, key)
    assert await world.train(prepare)
    assert world.audit(max_staleness=0).findings == []
    assert 2 in {each.epoch for each in learners[-1].compared}


async def test_more_than_the_run_allows_end_it_with_the_reason(make_world: MakeWorld) -> None:
    world = make_world()
    with pytest.raises(ExceptionGroup) as caught:
        await world.train(spoil(count=3))
    failure = root_cause(caught.value)
    assert isinstance(failure, InfraFailuresError)
    assert "3 of 6 rollouts were lost" in str(failure)
    assert "gone from the store" in str(failure)
    assert "contents/rl-" in str(failure)


async def test_a_batch_that_ended_the_run_is_trained_whole_once_its_objects_are_restored(
    make_world: MakeWorld,
) -> None:
    undisturbed = make_world(every_steps=100)
    assert await undisturbed.train()
    world = make_world(every_steps=100)
    learners: list[SpoiltLearners] = []

    def prepare(run: Run) -> None:
        learners.append(SpoiltLearners(run.store, count=3))
        replace_learners(run, learners[0])

    with pytest.raises(ExceptionGroup):
        await world.train(prepare)
    world.store.objects.update(learners[0].spoilt)
    assert await world.train()
    account = world.audit(max_staleness=0)
    assert account.findings == []
    assert account.dropped["damaged"] == 0
    assert world.digest == undisturbed.digest


async def test_it_is_not_scored_again_either(make_world: MakeWorld) -> None:
    world = make_world()
    assert await world.train(spoil())
    run = ResolvedRun.model_validate({"name": "demo", "uid": "run", "spec": world.spec})
    phases = inherit_context(run.spec.phases)
    groups = read_trained_groups(world.store, phases, first=SFT_STEPS + SPOILT, last=None)
    assert len(groups[0].records) == 2
    assert all(len(each.records) == 3 for each in groups[1:])
