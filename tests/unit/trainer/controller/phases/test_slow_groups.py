"""Groups that a full batch waits for: asyncLimits.onStale."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.trainer_simulation.workers import SimulatedLearners, SimulatedRollouts
from typing_extensions import override

from etude.common.weights import VersionId
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult
from etude.v1 import environments_pb2

MakeWorld = Callable[..., Any]
SLOW_GROUP = "rl-000000"
STALENESS, GROUPS = 2, 2 * 6


@dataclass(slots=True)
class OneSlowGroup(SimulatedRollouts):
    """Workers on which the first group does not end until it is cancelled, or drawn again."""

    cancelled: Counter[str] = field(default_factory=Counter)
    ends_after_s: float = 60.0
    dropped: list[str] = field(default_factory=list)
    """Rollouts with which nobody goes on."""

    @override
    def drop_rollouts(self, rollout_ids: Sequence[str]) -> None:
        self.dropped += rollout_ids

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        is_first = not any(each.group_id == order.group_id for each in self.orders)
        if order.group_id == SLOW_GROUP and is_first:
            self.orders.append(order)
            oldest = self.serving()
            try:
                await asyncio.sleep(self.ends_after_s)
            except asyncio.CancelledError:
                self.cancelled[order.group_id] += 1
                raise
            records = [self.record(order, index, oldest, self.serving()) for index in order.indices]
            return GroupResult(
                records=tuple(record.SerializeToString() for record in records),
                retried=0,
                driver="simulated",
                isolation=environments_pb2.ISOLATION_STRONG,
            )
        return await super(OneSlowGroup, self).run(order)


def world_with(make_world: MakeWorld, on_stale: str) -> Any:
    world = make_world(staleness=STALENESS)
    phases = [phase for phase in world.spec["phases"] if phase["name"] == "rl"]
    phases[0]["asyncLimits"]["onStale"] = on_stale
    world.spec |= {"phases": phases, "evaluation": []}
    return world


async def train(world: Any, *, ends_after_s: float = 60.0) -> OneSlowGroup:
    found: list[OneSlowGroup] = []

    def prepare(run: Run) -> None:
        workers = OneSlowGroup(
            lambda: run.publishing.served or VersionId(0, 0), ends_after_s=ends_after_s
        )
        run.dispatcher.workers = workers
        found.append(workers)

    assert await world.train(prepare)
    return found[0]


def events(world: Any, reason: str) -> list[dict[str, Any]]:
    return [row for row in world.rows("event") if row["reason"] == reason]


async def test_wait_trains_a_slow_group_within_the_bound(make_world: MakeWorld) -> None:
    world = world_with(make_world, "Wait")
    workers = await train(world, ends_after_s=0.5)
    audit = world.audit(max_staleness=STALENESS)
    assert not audit.findings
    assert not workers.cancelled
    assert not events(world, "SlowGroups")
    assert world.runs[-1].book.ledger.trained_groups["rl"] == GROUPS


async def test_drop_cancels_a_slow_group_and_trains_another_task(
    make_world: MakeWorld,
) -> None:
    world = world_with(make_world, "Drop")
    workers = await train(world)
    assert not world.audit(max_staleness=STALENESS).findings
    assert workers.cancelled[SLOW_GROUP] == 1
    assert [order.group_id for order in workers.orders].count(SLOW_GROUP) == 1
    assert world.runs[-1].book.ledger.trained_groups["rl"] == GROUPS
    (event,) = events(world, "SlowGroups")
    assert SLOW_GROUP in event["message"]
    assert "fewer long rollouts" in event["message"]


async def test_redraw_draws_a_slow_group_again_from_a_newer_version(
    make_world: MakeWorld,
) -> None:
    world = world_with(make_world, "Redraw")
    workers = await train(world)
    audit = world.audit(max_staleness=STALENESS)
    assert not audit.findings
    assert workers.cancelled[SLOW_GROUP] == 1
    first, again = [order for order in workers.orders if order.group_id == SLOW_GROUP]
    assert {first.rollout_id(i) for i in range(3)}.isdisjoint(again.rollout_id(i) for i in range(3))
    assert workers.dropped == [first.rollout_id(i) for i in range(3)]
    assert not again.is_continued
    assert first.seed == again.seed
    assert audit.trained == 3 * GROUPS
    assert len(events(world, "SlowGroups")) == 1


@dataclass(slots=True)
class DyingAfterRedraw(OneSlowGroup):
    """Workers whose controller dies at its next step once the slow group is drawn again."""

    kill: Callable[[], None] = lambda: None

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        if order.group_id in self.cancelled:
            self.orders.append(order)
            self.kill()
            await asyncio.sleep(60)
        return await super(DyingAfterRedraw, self).run(order)


async def test_a_successor_goes_on_with_the_newest_draw_of_a_slow_group(
    make_world: MakeWorld,
) -> None:
    world = world_with(make_world, "Redraw")

    def prepare(run: Run) -> None:
        def kill() -> None:
            assert isinstance(run.learners, SimulatedLearners)
            run.learners.steps_until_crash = 0

        run.dispatcher.workers = DyingAfterRedraw(
            lambda: run.publishing.served or VersionId(0, 0), kill=kill
        )

    with pytest.raises(ExceptionGroup):
        await world.train(prepare)
    assert await world.train()
    before, after = (run.dispatcher.workers.orders for run in world.runs)
    first, again = [order for order in before if order.group_id == SLOW_GROUP]
    (resumed,) = [order for order in after if order.group_id == SLOW_GROUP]
    assert resumed.is_continued
    assert [resumed.rollout_id(i) for i in range(3)] == [again.rollout_id(i) for i in range(3)]
    assert first.draws != again.draws
    assert not world.audit(max_staleness=STALENESS).findings


@pytest.mark.parametrize("on_stale", ["Redraw", "Drop"])
def test_mode_sync_refuses_what_has_no_effect_in_it(make_world: MakeWorld, on_stale: str) -> None:
    world = make_world()
    world.spec["phases"][1]["asyncLimits"]["onStale"] = on_stale
    with pytest.raises(ValueError, match="onStale has no effect in mode Sync"):
        world.start()
