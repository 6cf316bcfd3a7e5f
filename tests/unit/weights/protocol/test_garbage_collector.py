"""A collector that keeps next to nothing, among skips, keyframes, roll-backs and late readers.

Jobs run one after the other, but for readers that stop in the middle of a plan: orders of single
store calls are the machine's. Here the floors are as low as they go, and what must be left after
each round is asked of a copy of the store.
"""

import functools
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.support.release.channel_records import ChannelWriter
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.release.channels import retained_versions
from etude.common.weights import GarbageCollector, Retention, VersionId
from etude.common.weights.protocol.chain_view import take_lineage_view

play = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("machine_world.py"))))
READERS = ("r0", "r1", "r2")


class Collecting(RuleBasedStateMachine):
    """One publisher after the other, and a collector of the epoch that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.world = play.World()
        names = ("a", "keeper", *READERS)
        self.actors: dict[str, Any] = {name: play.Actor(self.world, name) for name in names}
        self.collector: GarbageCollector | None = None
        self.channel = ChannelWriter(self.world.raw, "stable", run_uid="r")
        self.open(back=1)
        self.publish(count=2, saves=True)

    @rule(count=st.integers(1, 3), saves=st.booleans())
    def publish(self, count: int, *, saves: bool) -> None:
        for _ in range(count):
            step = functools.partial(play.publish, place=0, value=0, saves=saves)
            if "base" in self.actors["a"].memory:
                self.actors["a"].whole(step)

    @rule(back=st.integers(1, 3))
    def open(self, back: int) -> None:
        self.actors["a"].whole(functools.partial(play.open_line, back=back))

    @rule(picks=st.tuples(st.integers(0, 6), st.integers(0, 6)))
    def fold(self, picks: tuple[int, int]) -> None:
        self.actors["keeper"].whole(functools.partial(play.keep, picks=picks))

    @rule(back=st.integers(0, 6))
    def write_keyframe(self, back: int) -> None:
        self.fold((back, back))

    @rule(name=st.sampled_from(READERS))
    def follow(self, name: str) -> None:
        if not self.actors[name].busy:
            self.actors[name].whole(play.follow)

    @rule(name=st.sampled_from(READERS), edges=st.integers(0, 3))
    def stop_on_the_way(self, name: str, edges: int) -> None:
        reader = self.actors[name]
        if reader.busy:
            relied = self.world.held.get(name)
            self.world.check()
            reader.finish()
            # Of a version that a roll-back left out nothing is promised.
            if relied and relied[-1].target.version not in self.world.left_out:
                assert not self.has_lost(reader), reader.refusal
            return
        reader.begin(play.follow)
        while reader.busy and not (name in self.world.held and edges <= 0):
            edges -= name in self.world.held and reader.call.startswith("get ")
            reader.step()

    def has_lost(self, reader: Any) -> bool:
        """Whether it was stopped by what a collector did."""
        return "deleted" in str(reader.refusal) or type(reader.refusal).__name__ == "MissingError"

    @rule()
    def move_on(self) -> None:
        """What is before the keyframe may go."""
        self.publish(count=1, saves=True)
        self.fold((0, 0))
        self.publish(count=1, saves=True)

    @rule(keyframe=st.booleans())
    def refuse_the_newest(self, *, keyframe: bool) -> None:
        """Its publisher rolls back to the version before, as a controller does."""
        chain = weights.accepted_chain(self.world.raw)
        if len(chain) > 1 and not self.world.held and chain[-1].epoch == self.world.opened:
            weights.quarantine(self.world.raw, chain[-1], reason="wrong bits")
            self.world.checkpoints = [v for v in self.world.checkpoints if v != chain[-1]]
            if keyframe:
                self.fold((0, 0))
            self.collect(versions=1, keyframes=1, retained=1)
            self.open(back=1)

    @rule(back=st.integers(0, 6), nothing=st.booleans())
    def serve(self, back: int, *, nothing: bool) -> None:
        """A channel serves a version that engines can get to, or nothing."""
        raw = self.world.raw
        chain = weights.accepted_chain(raw)
        version = chain[-1 - back % len(chain)]
        if nothing:
            self.channel.serve(None)
        elif weights.is_reachable(raw, version):
            self.channel.serve(version.number, epoch=version.epoch)

    @rule(
        versions=st.integers(1, 2),
        keyframes=st.integers(1, 2),
        retained=st.integers(0, 2),
    )
    def collect(self, versions: int, keyframes: int, retained: int) -> None:
        world = self.world
        roots = world.checkpoints[len(world.checkpoints) - retained :]
        if not world.opened or weights.is_fenced(world.raw, world.opened):
            return
        world.checkpoints = world.checkpoints[-2:] if retained == 2 else roots
        GarbageCollector(
            store=world.raw,
            epoch=world.opened,
            resumable=lambda: roots,
            served=lambda: retained_versions(world.raw, "r"),
            retention=Retention(versions=versions, keyframes=keyframes),
        ).collect()
        world.check()
        self.check_readers()
        self.check_resumes(roots)
        self.check_channel()

    def check_readers(self) -> None:
        """Whoever holds a lease gets to the newest version from what it has."""
        raw = self.world.raw
        refused = weights.list_quarantined(raw)
        newest = weights.newest_version(raw, besides=refused)
        for name in READERS:
            lease = self.actors[name].memory.get("lease")
            if newest is None or lease is None or lease.live is None:
                continue
            assert weights.plan_path(raw, lease.live, newest) is not None

    def check_channel(self) -> None:
        """Engines without weights get to what the channel serves, and may go back to."""
        raw = self.world.raw
        for version in retained_versions(raw, "r") - weights.list_quarantined(raw):
            view = take_lineage_view(raw, version)
            assert weights.plan_path(raw, None, version, view=view)

    def check_resumes(self, roots: list[VersionId]) -> None:
        """Every retained checkpoint can be resumed from, and engines get to its version."""
        for root in set(roots):
            copy = MemoryStore(objects=dict(self.world.raw.objects))
            epoch = weights.claim_epoch(copy, holder="x", parent=root, reason="rollback")
            assert weights.read_epoch(copy, epoch).parent == root, f"{root} is lost"
            assert weights.is_reachable(copy, root)

    @override
    def teardown(self) -> None:
        for actor in self.actors.values():
            while actor.busy and actor.error is None:
                actor.step("killed before")


TestCollecting = Collecting.TestCase
TestCollecting.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
