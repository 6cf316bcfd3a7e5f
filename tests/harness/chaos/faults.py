"""What the schedule does to a run: each fault with what shows that it was overcome."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.harness.chaos import schedule
from tests.harness.chaos.conductor import Conductor
from tests.harness.chaos.mutations import MUTATIONS
from tests.harness.chaos.publisher import FENCED, retained
from tests.harness.chaos.schedule import REPLICAS, Event
from tests.harness.chaos.spawning import Role
from typing_extensions import override

from etude.common import weights
from etude.common.errors import EtudeError
from etude.common.weights import VersionId

ORDERS = {
    "dense version": "dense",
    "version without change": "same",
    "complete version": "complete",
}
"""What the trainer is told for them."""


@dataclass(slots=True)
class FaultyRun(Conductor):
    """A run with the faults of its schedule."""

    events: deque[Event] = field(init=False)
    deeds: dict[str, Callable[[], None]] = field(init=False)
    joiners: int = 0
    """Replicas that are to start when the collector is about to delete something."""
    wrong_deltas: list[VersionId] = field(default_factory=list)

    @override
    def __post_init__(self) -> None:
        super(FaultyRun, self).__post_init__()
        mutation = self.settings.mutation
        only = MUTATIONS[mutation].provoked_by if mutation else None
        drawn = schedule.drawn(self.settings.seed, self.settings.versions, only=only)
        self.events = deque(drawn)
        self.deeds = {
            "kill publisher": lambda: self.kill("trainer", "kill publisher"),
            "kill keeper": lambda: self.kill("keeper", "kill keeper"),
            "kill replica": lambda: self.kill(self.some_replica(), "kill replica"),
            "kill rank": self.kill_rank,
            "zombie publisher": self.zombie_publisher,
            "zombie keeper": self.zombie_keeper,
            "overtaken reader": self.overtake,
            "late joiner": self.expect_joiner,
            "flip at rest": self.flip_at_rest,
            "wrong delta": self.wrong_delta,
            "store stopped": self.stop_store,
            "replica stopped for long": self.stop_replica,
        }

    def run(self) -> None:
        """Publish all versions, then wait until everybody serves the last one.

        Raises:
            StuckError: nothing goes on any more.
        """
        self.crew.start_trainer(None, "start")
        for place in ("keeper", *REPLICAS):
            self.crew.start(place)
        while len(self.published) < self.settings.versions:
            self.turn()
            while self.events and self.events[0].at <= len(self.published):
                self.do(self.events.popleft().kind)
        self.come_home()

    def do(self, kind: str) -> None:
        """One event of the schedule."""
        if kind.startswith("rank fails in "):
            self.fail_rank(kind.removeprefix("rank fails in "))
        elif kind in ORDERS:
            self.next_orders.append(ORDERS[kind])
        else:
            self.deeds[kind]()

    def some_replica(self) -> str:
        """One that runs."""
        return self.chance.choice(sorted(REPLICAS.keys() - self.crew.stopped))

    def kill(self, place: str, kind: str) -> None:
        """SIGKILL in the middle of something; the successor says that it is there."""
        self.injected[kind] += 1
        time.sleep(self.chance.uniform(0, 0.03))
        self.crew.kill(place)
        before = self.crew.lives[place]
        self.revive()
        self.seen[kind] += self.crew.lives[place] > before

    def kill_rank(self) -> None:
        """SIGKILL of one rank of two; the whole replica starts again."""
        who = self.crew.places["r1"].who
        if self.until(lambda: bool(self.crew.ranks.get("r1")), 5):
            self.injected["kill rank"] += 1
            self.crew.kill_process(self.chance.choice(self.crew.ranks.pop("r1")))
            end = time.monotonic() + 20
            while self.crew.places["r1"].who == who and time.monotonic() < end:
                self.turn()  # it is the next version that meets the gap
            self.seen["kill rank"] += self.crew.places["r1"].who != who

    def zombie_publisher(self) -> None:
        """Stop the trainer anywhere, let another take over, and wake the first one."""
        self.until(lambda: self.is_idle, 10)
        self.order("step")
        time.sleep(self.chance.uniform(0, 0.08))
        zombie = self.crew.exile("trainer")
        self.injected["zombie publisher"] += 1
        self.resume_training("takeover")
        wake_at = len(self.published) + self.chance.randint(1, 5)
        self.timers.append((wake_at, lambda: self.wake_publisher(zombie)))

    def wake_publisher(self, zombie: Role) -> None:
        """It must find out by itself: at the latest with the first step after the take-over."""
        self.crew.wake(zombie)
        self.until(lambda: self.is_idle, 20)  # so its successor has opened an epoch
        self.crew.tell_role(zombie, "step")
        self.until(lambda: not zombie.is_alive, 20)
        self.seen["zombie publisher"] += self.crew.check_end(zombie, {FENCED})
        self.crew.bury(zombie)

    def zombie_keeper(self) -> None:
        """Two keepers at once, one of them with old views."""
        zombie = self.crew.exile("keeper")
        self.injected["zombie keeper"] += 1
        self.crew.start("keeper")

        def end() -> None:
            self.seen["zombie keeper"] += zombie.is_alive
            self.crew.bury(zombie)

        def wake() -> None:
            self.crew.wake(zombie)
            self.timers.append((time.monotonic() + 2.0, end))

        self.timers.append((len(self.published) + self.chance.randint(2, 12), wake))

    def roll_back(self, below: VersionId) -> bool:
        """A new epoch whose parent is older than a version; whether it was opened."""
        self.injected["roll-back"] += 1
        self.crew.kill("trainer")
        self.resume_training("rollback", below)
        opened = self.until(lambda: self.is_idle, 20)
        for version in retained(self.settings):
            if version.number >= below.number:
                self.crew.forget_checkpoint(version)
        self.seen["roll-back"] += opened
        return opened

    def one_version(self, order: str) -> VersionId | None:
        """Publish one version now, and nothing after it."""
        if not self.until(lambda: self.is_idle, 20):
            return None
        count = len(self.published)
        self.order(order)
        return (
            self.published[-1]
            if self.until(lambda: self.is_idle, 20) and len(self.published) > count
            else None
        )

    def overtake(self) -> None:
        """A reader holds a prepared version while a new epoch leaves that version behind."""
        self.until(lambda: self.is_idle and self.is_home("r0"), 3)
        self.crew.tell("r0", ("hold", None))
        who = self.crew.places["r0"].who
        version = self.one_version("step")
        if version is not None:
            self.until(lambda: self.live.get(who) == version, 0.5)
            self.injected["overtaken reader"] += 1
            before = self.refusals["Fenced"]
            self.roll_back(version)
            self.crew.tell("r0", ("release", None))
            self.seen["overtaken reader"] += self.until(lambda: self.refusals["Fenced"] > before, 2)
        self.crew.tell("r0", ("release", None))

    @override
    def on_doomed(self, version: VersionId) -> None:
        """A fresh replica is sent to a version that is being collected."""
        if not self.joiners or "r0" in self.crew.stopped:
            return
        self.joiners -= 1
        self.injected["late joiner"] += 1
        self.crew.kill("r0")
        self.crew.start("r0", first=version)
        self.watched[self.crew.places["r0"].who] = "late joiner"

    def flip_at_rest(self) -> None:
        """One bit of what is stored is wrong; the version is refused for ever."""
        self.crew.stop("r0")
        version = self.one_version("step")
        before = self.refusals["Corrupt"]
        if version is not None:
            self.flip(version, self.injected["flip at rest"])
            self.injected["flip at rest"] += 1
        self.crew.resume("r0")
        if version is not None:
            self.crew.tell("r0", ("announce", version))
            self.seen["flip at rest"] += self.until(lambda: self.refusals["Corrupt"] > before, 3)
            self.refuse(version, "damaged in the store")

    def flip(self, version: VersionId, turn: int) -> None:
        """In turn: of a payload, of an index, of the manifest."""
        manifest = weights.read_manifest(self.raw, version)
        item = self.chance.choice(manifest.objects)
        key, places = item.key, range(item.index_offset)
        if turn % 3 == 1:
            places = range(item.index_offset, item.index_offset + item.index_length)
        elif turn % 3 == 2:
            key, places = version.manifest_key, range(len(self.raw.get(version.manifest_key)))
        data = bytearray(self.raw.get(key))
        data[self.chance.choice(places)] ^= 1 << self.chance.randrange(8)
        self.raw.put(key, bytes(data))

    def wrong_delta(self) -> None:
        """A version whose hashes are sound and whose weights are wrong."""
        before = self.refusals["Corrupt"]
        version = self.one_version("lie")
        if version is not None:
            self.injected["wrong delta"] += 1
            self.wrong_deltas.append(version)
            self.seen["wrong delta"] += self.until(lambda: self.refusals["Corrupt"] > before, 5)
            self.refuse(version, "replicas found other weights")

    def refuse(self, version: VersionId, why: str) -> None:
        """What the controller does with a version that replicas refuse."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                weights.quarantine(self.raw, version, reason=why)
                break
            except EtudeError:
                time.sleep(0.1)
        self.roll_back(version)

    def stop_store(self) -> None:
        """Nobody is answered for a while."""
        length_s = 10.0 if self.settings.versions >= 500 else 1.0
        before = self.refusals["StorageUnavailable"]
        self.injected["store stopped"] += 1
        self.outage.stop()
        self.until(lambda: False, length_s)
        self.outage.start()
        self.seen["store stopped"] += self.refusals["StorageUnavailable"] > before
        self.last_at = time.monotonic()

    def stop_replica(self) -> None:
        """r2 sleeps through a long part of the run."""
        self.crew.stop("r2")
        self.injected["replica stopped for long"] += 1

        def wake() -> None:
            who = self.crew.places["r2"].who
            self.live.pop(who, None)
            self.crew.resume("r2")
            self.watched[who] = "replica stopped for long"

        self.timers.append((len(self.published) + round(0.15 * self.settings.versions), wake))

    def fail_rank(self, method: str) -> None:
        """A rank of some replica fails next time; if the undo fails too, the replica ends."""
        fails = ["commit", "undo"] if method == "undo" else [method]
        place = self.some_replica()
        self.crew.tell(place, ("fail", fails))

    def expect_joiner(self) -> None:
        """The next time that something is collected."""
        self.joiners += 1
