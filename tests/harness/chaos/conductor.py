"""Keeps a run going: hears everybody, revives the dead, orders versions, brings all home."""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tests.harness.chaos.crew import Crew, Message
from tests.harness.chaos.publisher import retained
from tests.harness.chaos.schedule import REPLICAS
from tests.harness.chaos.settings import Settings

from etude.common import weights
from etude.common.blobs import Store
from etude.common.errors import EtudeError
from etude.common.weights import VersionId

LOOK_S = 0.005
PATIENCE_S = 0.4
"""How long the trainer waits for replicas that are behind."""
LAG = 3
CRASHES = 5
REPEAT, DELAY = 0.15, 0.15
"""Chances of an announcement to come twice, or after the next one."""


class Outage(Protocol):
    """A store that can be away for everybody."""

    def stop(self) -> None: ...
    def start(self) -> None: ...


class StuckError(Exception):
    """The run does not go on."""


@dataclass(slots=True)
class Conductor:
    """The run as its driver sees it; the oracle is not here but in the journals."""

    settings: Settings
    raw: Store
    outage: Outage
    crew: Crew = field(init=False)
    chance: random.Random = field(init=False)
    injected: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    published: list[VersionId] = field(default_factory=list)
    live: dict[str, VersionId] = field(default_factory=dict)
    """By process."""
    is_idle: bool = False
    """Whether the trainer waits for an order."""
    next_orders: list[str] = field(default_factory=list)
    late: list[tuple[str, VersionId]] = field(default_factory=list)
    """Announcements that come after the next one."""
    timers: list[tuple[int | float, Callable[[], None]]] = field(default_factory=list)
    """What happens at a number of versions (int), or at a time (float)."""
    watched: dict[str, str] = field(default_factory=dict)
    """Processes that overcome a fault as soon as they serve something new."""
    last_at: float = field(default_factory=time.monotonic)
    home: VersionId | None = None

    def __post_init__(self) -> None:
        self.crew = Crew(self.settings)
        self.chance = random.Random(f"{self.settings.seed}/conductor")

    def turn(self) -> None:
        """A moment: hear everybody, revive the dead, order the next version.

        Raises:
            StuckError: no version came for long.
        """
        for message in self.crew.messages(LOOK_S):
            self.hear(message)
        self.revive()
        self.run_timers()
        if self.is_idle and (self.is_nobody_behind() or self.waited() > PATIENCE_S):
            self.order(self.next_orders.pop() if self.next_orders else "step")
        if self.waited() > self.settings.patience_s:
            raise StuckError(f"no version after {self.published[-1:]}")

    def until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Hear everybody until something holds; whether it did in time."""
        end = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > end:
                return False
            for message in self.crew.messages(LOOK_S):
                self.hear(message)
            self.revive()
        return True

    def hear(self, message: Message) -> None:
        """Take in what a process said."""
        role, kind, what = message
        place = role.who.partition("-")[0]
        is_current = self.crew.places.get(place) is role
        match kind:
            case "opened":
                self.is_idle = self.is_idle or is_current
            case "published":
                self.published.append(what)
                self.last_at = time.monotonic()
                self.is_idle = self.is_idle or is_current
                self.announce(what)
            case "ready" if what is not None and is_current:
                self.crew.ranks[place] = what
            case "live":
                self.live[role.who] = what
                if role.who in self.watched:
                    self.seen[self.watched.pop(role.who)] += 1
            case "refused":
                self.refusals[what[0]] += 1
            case "doomed":
                self.on_doomed(what)
            case _:
                pass

    def on_doomed(self, version: VersionId) -> None:
        """A collector is about to delete a version."""

    def revive(self) -> None:
        """Start again whatever has ended.

        Raises:
            StuckError: processes end by themselves again and again.
        """
        if len(self.crew.crashes) > CRASHES:
            raise StuckError("processes crash")
        for place in self.crew.dead():
            if place == "trainer":
                self.resume_training("takeover")
            else:
                self.crew.start(place)

    def resume_training(self, reason: str, below: VersionId | None = None) -> None:
        """A new trainer goes on from the newest checkpoint, or from one below a version."""
        kept = retained(self.settings)
        if below is not None:
            kept = [version for version in kept if version.number < below.number]
        self.is_idle = False
        self.last_at = time.monotonic()
        self.crew.start_trainer(kept[-1] if kept else None, reason)

    def run_timers(self) -> None:
        """Do what is due."""
        now, count = time.monotonic(), len(self.published)
        due = [t for t in self.timers if t[0] <= (count if isinstance(t[0], int) else now)]
        for timer in due:
            self.timers.remove(timer)
            timer[1]()

    def order(self, what: str) -> None:
        """Have the trainer publish a version."""
        self.is_idle = False
        self.crew.tell("trainer", what)

    def waited(self) -> float:
        """Seconds since the last version."""
        return time.monotonic() - self.last_at

    def is_nobody_behind(self) -> bool:
        """Whether all replicas that run are near the newest version."""
        numbers = [
            found.number
            for place in REPLICAS.keys() - self.crew.stopped
            if (found := self.live.get(self.crew.places[place].who))
        ]
        return not self.published or min(numbers, default=0) >= self.published[-1].number - LAG

    def is_home(self, place: str) -> bool:
        """Whether a replica serves the version that was published last."""
        return self.live.get(self.crew.places[place].who) in self.published[-1:]

    def announce(self, version: VersionId) -> None:
        """Tell the replicas: once, twice, or too late."""
        for place, old in self.late:
            self.crew.tell(place, ("announce", old))
        self.late.clear()
        for place in REPLICAS:
            point = self.chance.random()
            if place in self.crew.stopped and point > 0.3:
                continue  # its line holds only so much
            if point < DELAY:
                self.injected["old announce"] += 1
                self.late.append((place, version))
                continue
            self.crew.tell(place, ("announce", version))
            if point < DELAY + REPEAT:
                self.injected["old announce"] += 1
                self.crew.tell(place, ("announce", version))

    def come_home(self) -> None:
        """End all faults, and wait until every replica serves the last version."""
        while self.timers:
            self.timers.pop()[1]()
        self.settings.calm.touch()
        for place in list(self.crew.stopped):
            self.crew.resume(place)
        self.until(lambda: self.is_idle, 20)
        self.order("step")
        self.until(lambda: self.is_idle, 20)
        try:
            self.home = weights.newest_version(self.raw, besides=weights.list_quarantined(self.raw))
        except EtudeError:
            self.home = None
        self.until(lambda: not self.strays(), self.settings.patience_s)

    def strays(self) -> list[str]:
        """Replicas that do not serve the last version."""
        return [
            place for place in REPLICAS if self.live.get(self.crew.places[place].who) != self.home
        ]

    def dismiss(self) -> None:
        """Let everybody end in order, then end whoever does not."""
        for place in REPLICAS:
            self.crew.tell(place, ("end", None))
        self.crew.tell("trainer", "end")
        self.crew.tell("keeper", "end")
        end = time.monotonic() + 10
        while time.monotonic() < end and any(r.is_alive for r in self.crew.places.values()):
            time.sleep(0.02)
        self.crew.end()
