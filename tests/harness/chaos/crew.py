"""The processes of a run: started, watched, killed, stopped, and started again."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from tests.harness.chaos import keeper, publisher, replica, spawning
from tests.harness.chaos.publisher import FENCED
from tests.harness.chaos.replica import FAILED
from tests.harness.chaos.schedule import REPLICAS
from tests.harness.chaos.settings import Settings
from tests.harness.chaos.spawning import Role

from etude.common.weights import VersionId

GRACE_S = 10.0
SHOWN = 20
"""Last lines of what a process wrote, when it ends wrongly or not at all."""


class Message(NamedTuple):
    """What a process said."""

    role: Role
    kind: str
    what: Any


@dataclass(slots=True)
class Crew:
    """Everybody by place: trainer, keeper, r0, r1, r2; zombies are nobody's any more."""

    settings: Settings
    places: dict[str, Role] = field(default_factory=dict)
    zombies: list[Role] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    """Places whose process has a SIGSTOP."""
    crashes: list[str] = field(default_factory=list)
    """Processes that ended by themselves, and should not have."""
    lives: Counter[str] = field(default_factory=Counter)
    ranks: dict[str, list[int]] = field(default_factory=dict)
    """Process ids of a replica's ranks."""

    def start(self, place: str, *, first: VersionId | None = None) -> Role:
        """Fill a place other than the trainer's."""
        if place == "keeper":
            return self._put(place, keeper.run)
        return self._put(place, replica.run, REPLICAS[place], first)

    def start_trainer(self, parent: VersionId | None, reason: str) -> Role:
        """Fill the trainer's place."""
        return self._put("trainer", publisher.run, parent, reason)

    def _put(self, place: str, target: Any, *args: object) -> Role:
        self.lives[place] += 1
        who = f"{place}-{self.lives[place]:03d}"
        role = spawning.start(target, self.settings, who, *args)
        self.places[place] = role
        self.stopped.discard(place)
        return role

    def messages(self, timeout_s: float) -> Iterator[Message]:
        """What was said meanwhile, also by zombies and by the dead."""
        roles = {role.link: role for role in [*self.places.values(), *self.zombies]}
        open_links = [link for link in roles if not link.closed]
        for link in wait(open_links, timeout_s):
            role = roles[link]  # type: ignore[index] # of connections only
            try:
                while role.link.poll():
                    kind, what = role.link.recv()
                    yield Message(role, kind, what)
            except (EOFError, OSError):
                role.link.close()

    def kill(self, place: str) -> None:
        """SIGKILL, and wait for the end."""
        self._end(self.places[place])

    def _end(self, role: Role) -> None:
        role.process.kill()
        role.process.join(GRACE_S)
        role.killed = True

    def stop(self, place: str) -> None:
        """SIGSTOP."""
        self._signal(self.places[place].pid, signal.SIGSTOP)
        self.stopped.add(place)

    def resume(self, place: str) -> None:
        """SIGCONT."""
        self.stopped.discard(place)
        self._signal(self.places[place].pid, signal.SIGCONT)

    def exile(self, place: str) -> Role:
        """Stop a process and take its place away."""
        role = self.places.pop(place)
        self._signal(role.pid, signal.SIGSTOP)
        self.zombies.append(role)
        return role

    def wake(self, zombie: Role) -> None:
        """SIGCONT for one that was exiled."""
        self._signal(zombie.pid, signal.SIGCONT)

    def bury(self, zombie: Role) -> None:
        """End one that was exiled."""
        self._end(zombie)
        self.zombies.remove(zombie)

    def dead(self) -> list[str]:
        """Places whose process has ended; one that nobody wanted to end is a crash."""
        found = [place for place, role in self.places.items() if not role.is_alive]
        for place in found:
            role = self.places[place]
            wanted = {FENCED} if place == "trainer" else {FAILED} if place in REPLICAS else set()
            if not role.killed:
                self.check_end(role, wanted)
        return found

    def check_end(self, role: Role, wanted: set[int]) -> bool:
        """Whether a process has ended as it should; else it counts as a crash."""
        status = role.process.exitcode
        if status in wanted:
            return True
        if role.is_alive:
            self._signal(role.pid, signal.SIGUSR1)
            time.sleep(0.2)  # it writes where it is
        errors = self.settings.folder / f"{role.who}.err"
        words = errors.read_text().splitlines() if errors.exists() else []
        self.crashes.append(f"{role.who} ended with status {status}: {words[-SHOWN:]}")
        return False

    def tell(self, place: str, message: object) -> None:
        """Send something to whoever has a place, if it still listens."""
        if place in self.places:
            self.tell_role(self.places[place], message)

    def tell_role(self, role: Role, message: object) -> None:
        """Send something to a process, if it still listens."""
        try:
            role.link.send(message)
        except (OSError, ValueError):
            return  # its end is noticed elsewhere

    def end(self) -> None:
        """End everybody, however they are."""
        for role in [*self.places.values(), *self.zombies]:
            self._end(role)

    def kill_process(self, pid: int) -> None:
        """SIGKILL of a rank."""
        self._signal(pid, signal.SIGKILL)

    def forget_checkpoint(self, version: VersionId) -> None:
        """A checkpoint of a version that was left behind."""
        publisher.checkpoint(self.settings, version).unlink(missing_ok=True)

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return  # its end is noticed elsewhere
