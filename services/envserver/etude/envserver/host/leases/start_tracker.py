"""Tracker of environments that start with their first call, and of how they started."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.envserver.drivers.base import SandboxStart
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.leases.lease_fields import STARTS
from etude.v1 import environments_pb2

MAX_NEWS = 4_096
"""Starts that wait to be reported; the oldest are forgotten first."""


class ReportedBeginning(NamedTuple):
    """The start of one environment, for a broker."""

    run_id: str
    beginning: environments_pb2.Beginning


@dataclass(slots=True)
class StartTracker:
    """Tracks environments from their lease until they have started."""

    _awaited: dict[str, LeasedEnvironment] = field(default_factory=dict)
    """Environments that have not started, by lease."""
    _news: deque[ReportedBeginning] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))

    def track(self, environment: LeasedEnvironment) -> None:
        """Track an environment, if its lease does not tell yet how it started."""
        if not environment.record.held.lease.start and not environment.is_used:
            self._awaited[environment.lease_id] = environment

    def untrack(self, environment: LeasedEnvironment) -> None:
        """Stop tracking the environment of an ended lease."""
        self._update(environment)
        self._awaited.pop(environment.lease_id, None)

    def record_grade(self, environment: LeasedEnvironment, begun: SandboxStart) -> None:
        """Record a grade's sandbox, which started in place of the lease's own."""
        self._awaited.pop(environment.lease_id, None)
        self._report(environment, begun)

    def num_awaited(self) -> Counter[str]:
        """Environments that have not started, by template."""
        self._update_all()
        return Counter(each.record.template for each in self._awaited.values())

    def take_beginnings(self) -> list[ReportedBeginning]:
        """Return and clear the starts since the last call."""
        self._update_all()
        found = list(self._news)
        self._news.clear()
        return found

    def _update_all(self) -> None:
        for environment in list(self._awaited.values()):
            self._update(environment)

    def _update(self, environment: LeasedEnvironment) -> None:
        if environment.lease_id not in self._awaited:
            return
        held, begun = environment.record.held, environment.sandbox.sandbox_start
        if begun is not None:
            held.lease.start = STARTS[begun.kind]
            held.lease.start_ms = round(1000 * begun.took_s)
            self._report(environment, begun)
        # In a turn it may be about to start, and its warm VM is not taken yet.
        if begun is not None or (environment.is_used and not environment.turn.locked()):
            del self._awaited[environment.lease_id]

    def _report(self, environment: LeasedEnvironment, begun: SandboxStart) -> None:
        beginning = environments_pb2.Beginning(
            template=environment.record.template,
            start=STARTS[begun.kind],
            start_ms=round(1000 * begun.took_s),
        )
        self._news.append(ReportedBeginning(environment.record.held.run_id, beginning))
