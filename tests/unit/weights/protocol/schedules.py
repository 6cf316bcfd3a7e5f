"""What holds in one order of store calls: each sentence needs one check of the protocol."""

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.common import weights
from etude.common.errors import FencedError
from etude.common.weights import QuarantinedVersionError, VersionId
from etude.common.weights.protocol import versions
from etude.common.weights.protocol.tombstones import read_trash

play = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("machine_world.py"))))
Actor = Any
"""A play.Actor."""
V = [VersionId(1, number) for number in range(9)]
TRASH, LEASES, EPOCHS = "weights/trash/", "weights/leases/", "weights/epochs/"
MANIFESTS, DELTAS = "weights/manifests/", "weights/deltas/"


class Cast:
    """Publisher a has published versions 1.0 to 1.3 and holds the line; the others are idle."""

    def __init__(self) -> None:
        self.world = play.World()
        self.a, self.b, self.r, self.keeper, self.c, self.d = (
            play.Actor(self.world, name) for name in ("a", "b", "r", "keeper", "c", "d")
        )
        self.open(self.a)
        self.publish(self.a, 4)

    def leave(self) -> None:
        """Nobody is left asleep."""
        for actor in (self.a, self.b, self.r, self.keeper, self.c, self.d):
            while actor.busy and actor.error is None:
                actor.step("killed before")

    def open(self, actor: Actor, back: int = 1) -> None:
        actor.whole(functools.partial(play.open_line, back=back))

    def publish(self, actor: Actor, count: int = 1, *, saves: bool = True) -> None:
        for _ in range(count):
            actor.whole(functools.partial(play.publish, place=0, value=0, saves=saves))
            assert actor.refusal is None, actor.refusal

    def keyframe(self) -> None:
        """Of the newest version: nobody but readers and resumes needs what is before it."""
        self.keeper.whole(functools.partial(play.keep, picks=(0, 0)))

    def move_on(self) -> None:
        """A keyframe of 1.5, checkpoints of it and of 1.6: what is before them may go."""
        self.publish(self.a, 2)
        self.keyframe()
        self.publish(self.a)

    def published(self, version: VersionId) -> bool:
        return self.world.raw.head(version.manifest_key) is not None

    @staticmethod
    def until_it_relies(reader: Actor) -> None:
        """On what it planned; it may find no plan."""
        while reader.busy and reader.name not in reader.world.held:
            reader.step()

    def tombstones(self) -> list[str]:
        return [key for key in self.world.raw.objects if key.startswith(TRASH)]


one_step = functools.partial(play.publish, place=0, value=0, saves=False)
follow = play.follow
collect = play.collect
quarantine = functools.partial(weights.quarantine, reason="wrong bits")


# --- Publishers ---


def a_publisher_that_was_overtaken_during_its_commit_publishes_nothing(cast: Cast) -> None:
    cast.a.begin(one_step)
    cast.a.until(f"head {EPOCHS}", past=True)
    cast.open(cast.b)
    cast.a.finish()
    assert isinstance(cast.a.refusal, FencedError)
    assert not cast.published(V[4])


def a_fenced_publisher_is_told_so_whatever_was_collected_meanwhile(cast: Cast) -> None:
    cast.open(cast.b, back=4)
    cast.publish(cast.b, 2)
    cast.c.whole(collect)
    assert not cast.published(V[3])
    cast.a.whole(one_step)
    assert isinstance(cast.a.refusal, FencedError)


def of_two_contents_of_a_version_the_first_stays(cast: Cast) -> None:
    before = dict(cast.a.memory)
    cast.publish(cast.a)
    first = weights.read_manifest(cast.world.raw, V[4])
    cast.a.memory.update(before)
    ledger = dict(cast.world.ledger)
    cast.a.whole(functools.partial(play.publish, place=1, value=0, saves=False))
    cast.world.ledger.update(ledger)
    assert isinstance(cast.a.refusal, FencedError)
    assert weights.read_manifest(cast.world.raw, V[4]) == first


def a_commit_that_is_repeated_after_its_reply_was_lost_is_one_version(cast: Cast) -> None:
    cast.a.begin(one_step)
    cast.a.until(f"create {MANIFESTS}")
    cast.a.step("fails after")
    cast.a.finish()
    assert cast.a.refusal is None
    assert cast.a.memory["base"].version == V[4]


def a_version_that_was_refused_before_its_publisher_heard_of_it_is_not_built_upon(
    cast: Cast,
) -> None:
    cast.a.begin(one_step)
    cast.a.until(f"create {MANIFESTS}")
    cast.a.step("fails after")
    cast.a.step("fails before")  # nor can it look what became of it
    quarantine(cast.world.raw, V[4])
    cast.a.finish()
    assert isinstance(cast.a.refusal, QuarantinedVersionError)


def nothing_builds_on_a_refused_version(cast: Cast) -> None:
    quarantine(cast.world.raw, V[3])
    cast.a.whole(one_step)
    assert isinstance(cast.a.refusal, QuarantinedVersionError)
    assert not cast.published(V[4])


def nothing_builds_on_a_version_that_the_take_over_left_out(cast: Cast) -> None:
    abandoned = weights.read_manifest(cast.world.raw, V[3]).ref
    cast.open(cast.b, back=3)
    model = cast.world.ledger[V[3]]
    cast.b.memory.update(base=abandoned, model=model)
    with pytest.raises(ValueError, match="neither of epoch 2 nor its parent"):
        cast.b.whole(one_step)
    assert weights.accepted_chain(cast.world.raw) == V[:1]


def nothing_builds_on_what_another_published_under_the_bases_name(cast: Cast) -> None:
    ref = cast.a.memory["base"]
    cast.a.memory["base"] = ref.model_copy(update={"state": "0" * 32})
    with pytest.raises(ValueError, match="is not what the store has"):
        cast.a.whole(one_step)
    assert not cast.published(V[4])


def a_number_below_the_epochs_first_is_not_published(cast: Cast) -> None:
    cast.open(cast.b, back=3)
    cast.b.memory["next"] = 3
    with pytest.raises(ValueError, match="starts at number 4"):
        cast.b.whole(one_step)
    assert not cast.published(VersionId(2, 3))


def a_version_whose_schema_never_arrived_is_not_published(cast: Cast) -> None:
    cast.world.raw.delete([versions.schema_key(play.SCHEMA)])
    cast.a.whole(one_step)
    assert not cast.published(V[4])


# --- Epochs ---


def two_publishers_that_open_at_once_do_not_share_an_epoch(cast: Cast) -> None:
    cast.a.begin(functools.partial(play.open_line, back=1))
    cast.a.until((f"create {EPOCHS}", f"put {EPOCHS}"))
    cast.open(cast.b)
    cast.a.finish()
    assert (cast.b.memory["epoch"], cast.a.memory["epoch"]) == (2, 3)


def a_controller_that_was_overtaken_does_not_roll_back(cast: Cast) -> None:
    cast.open(cast.b)
    cast.a.whole(functools.partial(play.open_line, back=3, after=1))
    assert isinstance(cast.a.refusal, FencedError)
    assert not weights.is_fenced(cast.world.raw, 2)


def numbers_rise_over_take_overs(cast: Cast) -> None:
    cast.open(cast.b, back=3)
    assert cast.b.memory["next"] == 4


def numbers_of_deleted_versions_do_not_come_again(cast: Cast) -> None:
    cast.open(cast.b, back=4)
    cast.world.checkpoints = [V[0]]
    cast.c.whole(collect)
    assert versions.list_all_published(cast.world.raw) == V[:1]
    cast.open(cast.a)
    assert cast.a.memory["next"] == 4


def who_resumes_from_what_is_being_deleted_begins_a_new_chain(cast: Cast) -> None:
    cast.b.begin(functools.partial(play.open_line, back=2))
    cast.b.until(f"create {EPOCHS}")
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until(f"delete {MANIFESTS}")
    cast.b.finish()
    cast.c.finish()
    base = cast.b.memory["base"]
    assert base is None or cast.published(base.version)
    cast.publish(cast.b)
    cast.world.check()


# --- Readers ---


def a_reader_that_moves_during_a_take_over_serves_nothing_abandoned(cast: Cast) -> None:
    cast.r.begin(follow)
    cast.r.until(f"get {DELTAS}", past=True)
    cast.open(cast.b, back=4)
    cast.r.finish()
    assert cast.r.memory.get("model") in {None, cast.world.ledger[V[0]]}


def a_reader_that_planned_before_the_tombstone_keeps_its_objects(cast: Cast) -> None:
    cast.r.begin(follow)
    cast.r.until(f"get {DELTAS}")
    cast.move_on()
    cast.c.whole(collect)
    cast.r.finish()
    assert cast.r.refusal is None


def a_reader_whose_lease_came_after_the_last_look_plans_around_the_tombstone(cast: Cast) -> None:
    cast.r.begin(follow)
    cast.r.until(f"put {LEASES}")
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until(f"delete {MANIFESTS}")
    cast.until_it_relies(cast.r)
    cast.c.finish()
    cast.world.check()


def a_reader_whose_lease_came_before_the_tombstone_is_seen_by_the_last_look(cast: Cast) -> None:
    cast.r.begin(follow)
    cast.r.until(f"put {LEASES}")
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until(f"create {TRASH}")
    cast.until_it_relies(cast.r)
    assert "r" in cast.world.held
    cast.c.finish()
    cast.world.check()


def a_reader_that_moves_on_needs_only_what_is_ahead(cast: Cast) -> None:
    cast.r.whole(follow)
    cast.move_on()
    cast.r.whole(follow)
    cast.c.whole(collect)
    assert weights.accepted_chain(cast.world.raw) == V[5:7]


def a_reader_goes_around_a_refused_version(cast: Cast) -> None:
    cast.publish(cast.a)  # committed before its base was refused
    quarantine(cast.world.raw, V[3])
    cast.r.whole(follow)
    assert "model" not in cast.r.memory


def a_refused_version_is_not_served(cast: Cast) -> None:
    quarantine(cast.world.raw, V[3])
    cast.r.whole(follow)
    assert isinstance(cast.r.refusal, QuarantinedVersionError)
    assert "model" not in cast.r.memory


# --- Collectors ---


def a_collector_that_sleeps_through_a_take_over_deletes_nothing(cast: Cast) -> None:
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until(f"create {TRASH}")
    cast.open(cast.b, back=1)
    before = {key for key in cast.world.raw.objects if not key.startswith(TRASH)}
    cast.c.finish()
    assert before <= set(cast.world.raw.objects)


def a_tombstone_that_another_collector_carries_out_is_not_taken_back(cast: Cast) -> None:
    cast.r.begin(follow)
    cast.r.until(f"put {LEASES}")
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until(f"delete {MANIFESTS}")  # it has looked, and sees no lease
    cast.r.step()
    cast.d.whole(collect)  # it sees the lease
    cast.until_it_relies(cast.r)
    cast.c.finish()
    cast.world.check()


def a_tombstone_that_was_never_used_is_taken_back(cast: Cast) -> None:
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until(f"create {TRASH}", past=True)
    lease = weights.ReaderLease(cast.world.raw, "late")
    lease.record_live(weights.read_manifest(cast.world.raw, V[1]).ref)
    cast.c.finish()
    assert cast.tombstones() == []


def what_is_published_while_a_collector_lists_is_not_announced(cast: Cast) -> None:
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until(f"list {DELTAS}")
    cast.publish(cast.a)
    cast.c.until(f"create {TRASH}")
    cast.c.step("killed after")
    cast.r.whole(follow)
    assert cast.r.refusal is None
    assert cast.r.memory["lease"].live.version == V[7]


def a_refused_version_is_nobodys_beginning(cast: Cast) -> None:
    cast.keyframe()
    quarantine(cast.world.raw, V[3])
    cast.world.checkpoints = [V[2]]
    cast.c.whole(collect)
    assert weights.is_reachable(cast.world.raw, V[2])
    cast.world.checkpoints = []
    cast.c.whole(collect)
    assert weights.is_reachable(cast.world.raw, V[2])


def a_collector_that_dies_half_way_leaves_no_name_without_its_objects(cast: Cast) -> None:
    cast.keeper.whole(functools.partial(play.keep, picks=(1, 3)))
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until("delete weights/")
    cast.c.step("killed half-way")
    for version in versions.list_all_published(cast.world.raw):
        for item in weights.read_manifest(cast.world.raw, version).objects:
            assert cast.world.raw.head(item.key) is not None, item.key


def a_chain_that_a_dead_collector_shortened_has_no_hole(cast: Cast) -> None:
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until(f"delete {MANIFESTS}")
    doomed = doomed_keys(cast.world.raw)
    for key in [key for key in doomed if key.startswith(MANIFESTS)][:2]:
        cast.world.raw.delete([key])
    chain = weights.accepted_chain(cast.world.raw)
    assert chain[0] == V[0]
    cast.c.step("killed before")


def a_deletion_that_was_begun_is_finished_by_the_next_collector(cast: Cast) -> None:
    cast.move_on()
    cast.c.begin(collect)
    cast.c.until(f"delete {MANIFESTS}")
    cast.c.step("killed half-way")
    cast.d.whole(collect)
    assert cast.tombstones() == []
    assert not [key for key in cast.world.raw.objects if "/000000000002" in key]


def what_an_overtaken_publisher_is_about_to_name_is_left_to_it_for_a_while(cast: Cast) -> None:
    cast.a.begin(one_step)
    cast.a.until(f"create {MANIFESTS}")
    cast.open(cast.b)
    cast.publish(cast.b)
    cast.c.whole(collect)
    cast.a.finish()


def doomed_keys(store: Any) -> list[str]:
    return [key for each in read_trash(store).tombstones for key in each.keys]


SCHEDULES: dict[str, Callable[[Cast], None]] = {
    name.replace("_", " "): each
    for name, each in list(globals().items())
    if getattr(each, "__annotations__", {}).get("cast") is Cast
}
