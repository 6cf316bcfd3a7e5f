"""A simulated pool: replicas that take their time to be ready, fail, hold leases and go."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple

from autoscaler_bench.events import Clock
from autoscaler_bench.traces import Ask, Trace
from etude.operator.pools.autoscaling.values import HeldLeases, IdleReplica

AGE_STEP_S = 5.0
"""Leases that began within so long are told as one."""


@dataclass(slots=True, kw_only=True)
class Replica:
    """One replica."""

    name: str
    born_s: float
    leased: int = 0
    has_served: bool = False
    idle: IdleReplica | None = None


class Waiting(NamedTuple):
    """An environment that was asked for."""

    ask: Ask
    since_s: float
    granted: Callable[[], None]
    ended: Callable[[], None]


@dataclass(slots=True)
class Pool:
    """Replicas, those who wait for them, and what they cost."""

    clock: Clock
    trace: Trace
    creating: int = 0
    terminating: int = 0
    leased: int = 0
    queue: deque[Waiting] = field(default_factory=deque)
    took_s: list[float | None] = field(default_factory=list)
    """From creation to ready; None of replicas that failed."""
    waits_s: list[float] = field(default_factory=list)
    created: int = 0
    over_created: int = 0
    """Replicas that are gone and never held a lease."""
    sandbox_s: float = 0.0
    """Of replicas that are gone."""
    _by_leases: list[dict[str, Replica]] = field(init=False)
    """Ready replicas by how many leases they hold."""
    _since: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Leases by template and when they began."""
    _births: dict[str, float] = field(default_factory=dict)
    """Of replicas that are not ready yet, or not any more."""
    _coming: dict[str, Replica] = field(default_factory=dict)
    """Replicas that are not ready yet and still wanted, the newest last."""
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._by_leases = [{} for _ in range(self.trace.slots + 1)]
        self._random = Random(self.trace.seed)  # noqa: S311 - a draw, no secret

    @property
    def ready(self) -> int:
        """Replicas that take leases."""
        return sum(len(replicas) for replicas in self._by_leases)

    @property
    def holding(self) -> int:
        """Replicas that hold a lease."""
        return self.ready - len(self._by_leases[0])

    @property
    def demand(self) -> int:
        """Slots that are leased or waited for."""
        return self.leased + len(self.queue)

    def idle(self) -> tuple[IdleReplica, ...]:
        """Replicas without a lease."""
        return tuple(r.idle for r in self._by_leases[0].values() if r.idle is not None)

    def held(self) -> tuple[HeldLeases, ...]:
        """Leases by template and age; ages that are near each other are told as one."""
        found: Counter[tuple[str, int]] = Counter()
        for (template, step), count in self._since.items():
            found[template, (max(0, round(self.clock.now_s / AGE_STEP_S - step))).bit_length()] += (
                count
            )
        return tuple(
            HeldLeases(template, count, AGE_STEP_S * (2**bits - 1) * 0.75)
            for (template, bits), count in found.items()
        )

    def create(self) -> None:
        """Begin one more replica."""
        replica = Replica(name=f"r{self.created:05d}", born_s=self.clock.now_s)
        self.created += 1
        self.creating += 1
        self._births[replica.name] = replica.born_s
        self._coming[replica.name] = replica
        took_s, fails = self.trace.provisioning.drawn(self._random)
        self.clock.after(took_s, lambda: self._failed(replica) if fails else self._up(replica))

    def remove(self, name: str) -> None:
        """Give up a replica, unless it took a lease since."""
        replica = self._by_leases[0].pop(name, None)
        if replica is None:
            return
        self.terminating += 1
        self._births[name] = replica.born_s
        self.clock.after(self.trace.provisioning.going_s, partial(self._gone, replica))

    def withdraw(self, count: int) -> None:
        """Give up the newest of those that are not ready yet."""
        for name in list(self._coming)[::-1][:count]:
            replica = self._coming.pop(name)
            self.creating -= 1
            self.terminating += 1
            self.clock.after(self.trace.provisioning.going_s, partial(self._gone, replica))

    def ask(self, waiting: Waiting) -> None:
        """Wait for an environment."""
        self.queue.append(waiting)
        self._grant()

    def close(self) -> None:
        """Count what is left at the end."""
        for replicas in self._by_leases:
            for replica in replicas.values():
                self._counted(replica)
        self.sandbox_s += sum(self.clock.now_s - born_s for born_s in self._births.values())
        self.over_created += self.creating

    def _up(self, replica: Replica) -> None:
        if self._coming.pop(replica.name, None) is None:
            return
        self.creating -= 1
        del self._births[replica.name]
        self.took_s.append(self.clock.now_s - replica.born_s)
        self._settle(replica)
        self._grant()

    def _failed(self, replica: Replica) -> None:
        if self._coming.pop(replica.name, None) is None:
            return
        self.creating -= 1
        del self._births[replica.name]
        self.took_s.append(None)
        # It cost its time, but no decision made it useless.
        self.sandbox_s += self.clock.now_s - replica.born_s

    def _gone(self, replica: Replica) -> None:
        self.terminating -= 1
        del self._births[replica.name]
        self._counted(replica)

    def _counted(self, replica: Replica) -> None:
        self.sandbox_s += self.clock.now_s - replica.born_s
        self.over_created += not replica.has_served

    def _settle(self, replica: Replica) -> None:
        if not replica.leased:
            replica.idle = IdleReplica(replica.name, self.clock.now_s)
        self._by_leases[replica.leased][replica.name] = replica

    def _grant(self) -> None:
        """The fullest replica first, and of the idle ones the newest: the others may go."""
        while self.queue:
            free = next((each for each in self._by_leases[-2::-1] if each), None)
            if free is None:
                return
            _, replica = free.popitem()
            replica.leased += 1
            replica.has_served = True
            self._settle(replica)
            self._lease(replica, self.queue.popleft())

    def _lease(self, replica: Replica, waiting: Waiting) -> None:
        self.leased += 1
        self.waits_s.append(self.clock.now_s - waiting.since_s)
        key = (waiting.ask.template, round(self.clock.now_s / AGE_STEP_S))
        self._since[key] += 1
        waiting.granted()

        def over() -> None:
            self.leased -= 1
            self._since[key] -= 1
            if not self._since[key]:
                del self._since[key]
            del self._by_leases[replica.leased][replica.name]
            replica.leased -= 1
            self._settle(replica)
            self._grant()
            waiting.ended()

        self.clock.after(waiting.ask.held_s, over)
