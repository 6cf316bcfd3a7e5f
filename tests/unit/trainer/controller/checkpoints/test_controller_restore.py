"""A run that is put back to an older checkpoint goes on from there, and stays there."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.checkpoints import manifest
from etude.common.checkpoints.manifest import CheckpointId
from etude.common.errors import UserError
from etude.common.role_inputs import ResumeAt
from etude.common.weights import VersionId
from etude.trainer.controller.checkpoints import lineage
from etude.trainer.controller.checkpoints.lineage import Branch
from etude.trainer.controller.run import Run

MakeWorld = Callable[..., Any]
SFT_STEPS, RL_STEPS = 4, 6


def admitted(run: Run) -> list[str]:
    return list(run.book.ledger.consumed)


async def test_a_run_that_is_put_back_trains_the_same_tasks_in_the_same_order(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world(every_steps=2)
    await world.crash(after=SFT_STEPS + 5)
    before = admitted(world.runs[-1])
    world.resume = {"number": 1, "step": SFT_STEPS + 2}
    run, _, checkpoint = world.start()
    assert checkpoint.manifest.checkpoint_id == CheckpointId(0, SFT_STEPS + 2)
    assert run.progress.cursor.global_step == SFT_STEPS + 2
    assert len(admitted(run)) < len(before)
    assert before[: len(admitted(run))] == admitted(run)
    assert await world.train()
    assert admitted(world.runs[-1])[: len(before)] == before
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []


async def test_groups_of_a_run_that_is_put_back_know_the_versions_that_were_left(
    make_world: MakeWorld,
) -> None:
    world = make_world(every_steps=2)
    await world.crash(after=SFT_STEPS + 5)
    left = world.runs[-1].progress.cursor.policy
    world.resume = {"number": 1, "step": SFT_STEPS + 2}
    assert await world.train()
    run = world.runs[-1]
    for order in run.dispatcher.workers.orders:
        if order.group_id.startswith("rl-"):
            (rollback,) = order.rollbacks
            assert rollback.epoch == run.progress.epoch
            assert rollback.abandons(VersionId(*left))
            assert not rollback.abandons(VersionId(left[0], rollback.newest))


async def test_it_is_put_back_once_and_then_goes_on_from_its_newest_checkpoint(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world(every_steps=2)
    await world.crash(after=SFT_STEPS + 5)
    world.resume = {"number": 1, "step": SFT_STEPS}
    await world.crash(after=1)
    run, _, checkpoint = world.start()
    assert checkpoint.manifest.step == SFT_STEPS
    assert run.book.ledger.batches, "the step that was trained since is known"
    await world.crash(after=4)
    run, _, checkpoint = world.start()
    assert checkpoint.manifest.checkpoint_id == CheckpointId(1, SFT_STEPS + 4)
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []


async def test_what_a_run_left_is_neither_overwritten_nor_gone_on_from(
    make_world: MakeWorld,
) -> None:
    world = make_world(every_steps=2)
    await world.crash(after=SFT_STEPS + 5)
    left = dict(world.store.objects)
    world.resume = {"number": 1, "step": SFT_STEPS}
    assert await world.train()
    kept = {k: v for k, v in left.items() if k.startswith("checkpoints/")}
    assert kept.items() <= world.store.objects.items()
    found = list(manifest.stored_checkpoints(world.store, run="run"))
    new = [c.manifest for c in found if c.manifest.branch]
    assert [m.step for m in new] == [SFT_STEPS + 2, SFT_STEPS + 4, SFT_STEPS + RL_STEPS]
    parents = [(m.parent.branch, m.parent.step) for m in new if m.parent is not None]
    assert parents == [(0, SFT_STEPS), (1, SFT_STEPS + 2), (1, SFT_STEPS + 4)]


async def test_a_run_may_go_back_to_what_it_left_and_to_its_start(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world(every_steps=2)
    await world.crash(after=SFT_STEPS + 5)
    world.resume = {"number": 1, "step": SFT_STEPS}
    await world.crash(after=3)
    world.resume = {"number": 2, "step": SFT_STEPS + 4, "branch": 0}
    run, _, _ = world.start()
    assert run.checkpoints.branch == Branch(2, (CheckpointId(0, SFT_STEPS + 4),))
    assert run.progress.cursor.global_step == SFT_STEPS + 4
    world.resume = {"number": 4}
    run, _, checkpoint = world.start()
    assert checkpoint is None
    assert (run.progress.cursor.global_step, admitted(run)) == (0, [])
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []


async def test_a_damaged_one_gives_way_to_the_one_before_it(make_world: MakeWorld) -> None:
    world = make_world(every_steps=2)
    await world.crash(after=SFT_STEPS + 5)
    place = CheckpointId(0, SFT_STEPS + 2)
    damaged = next(k for k in world.store.objects if k.startswith(place.prefix) and "learner" in k)
    world.store.objects[damaged] = b"garbage"
    world.resume = {"number": 1, "step": place.step}
    _, _, checkpoint = world.start()
    assert checkpoint.manifest.step == SFT_STEPS


async def test_a_lost_one_is_refused_in_words(make_world: MakeWorld) -> None:
    world = make_world(every_steps=2)
    await world.crash(after=2)
    world.resume = {"number": 1, "step": 7, "branch": 3}
    with pytest.raises(UserError, match="step 7 is no longer in the store"):
        world.start()


async def test_a_run_killed_before_it_was_put_back_is_put_back_by_the_next(
    make_world: MakeWorld,
) -> None:
    world = make_world(every_steps=2)
    await world.crash(after=SFT_STEPS + 5)
    world.resume = {"number": 1, "step": SFT_STEPS}
    world.start()  # its journal was never written
    run, _, _ = world.start()
    assert run.progress.cursor.global_step == SFT_STEPS
    assert run.checkpoints.branch.number == 1


places = st.builds(CheckpointId, st.integers(0, 3), st.integers(0, 30))


@given(st.lists(places, unique=True), st.integers(0, 40), st.integers(0, 3))
def test_no_target_is_newer_than_what_was_asked_for(
    known: list[CheckpointId], step: int, branch: int
) -> None:
    asked = ResumeAt(number=9, step=step, branch=branch)
    found = lineage.restore_candidates(known, asked)
    assert found == sorted(found, reverse=True)
    assert set(found) == {p for p in known if p.branch == branch and p.step <= step}


@given(st.lists(places, unique=True), places)
def test_the_past_holds_nothing_that_was_left(
    known: list[CheckpointId], last: CheckpointId
) -> None:
    way = Branch(9, (last,))
    new = [CheckpointId(9, step) for step in (40, 41)]
    found = lineage.ancestors([*known, *new], way)
    assert found[:2] == [CheckpointId(9, 41), CheckpointId(9, 40)]
    assert all(p.branch == last.branch and p.step <= last.step for p in found[2:])
    assert Branch.from_proto(way.to_proto()) == way
