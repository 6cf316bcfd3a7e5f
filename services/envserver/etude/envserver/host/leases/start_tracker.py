"""Environments that begin with their first call: which have not yet, and how the others did."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.envserver.drivers.base import Begun
from etude.envserver.host.environment import Environment
from etude.envserver.host.leases.lease_fields import STARTS
from etude.v1 import environments_pb2

MAX_NEWS = 4_096
"""Beginnings that wait to be told; the oldest are forgotten first."""


class News(NamedTuple):
    """One environment began."""

    run_id: str
    beginning: environments_pb2.Beginning


@dataclass(slots=True)
class Starts:
    """Follows environments from their lease until they have begun."""

    _awaited: dict[str, Environment] = field(default_factory=dict)
    """Those that have not, by lease."""
    _news: deque[News] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))

    def opened(self, environment: Environment) -> None:
        """There is a lease; if it does not say how its environment began, a call will show."""
        if not environment.record.held.lease.start and not environment.is_used:
            self._awaited[environment.lease_id] = environment

    def ended(self, environment: Environment) -> None:
        """There is no such lease any more."""
        self._look(environment)
        self._awaited.pop(environment.lease_id, None)

    def graded(self, environment: Environment, begun: Begun) -> None:
        """A grade began in a sandbox of its own, in place of the one that its lease might have."""
        self._awaited.pop(environment.lease_id, None)
        self._tell(environment, begun)

    def awaited(self) -> Counter[str]:
        """Environments by template that are still to begin."""
        self._look_at_all()
        return Counter(each.record.template for each in self._awaited.values())

    def news(self) -> list[News]:
        """Those that began since somebody last asked."""
        self._look_at_all()
        found = list(self._news)
        self._news.clear()
        return found

    def _look_at_all(self) -> None:
        for environment in list(self._awaited.values()):
            self._look(environment)

    def _look(self, environment: Environment) -> None:
        if environment.lease_id not in self._awaited:
            return
        held, begun = environment.record.held, environment.sandbox.begun
        if begun is not None:
            held.lease.start = STARTS[begun.start]
            held.lease.start_ms = round(1000 * begun.took_s)
            self._tell(environment, begun)
        # In a turn it may be about to begin, and what it begins from is not taken yet.
        if begun is not None or (environment.is_used and not environment.turn.locked()):
            del self._awaited[environment.lease_id]

    def _tell(self, environment: Environment, begun: Begun) -> None:
        beginning = environments_pb2.Beginning(
            template=environment.record.template,
            start=STARTS[begun.start],
            start_ms=round(1000 * begun.took_s),
        )
        self._news.append(News(environment.record.held.run_id, beginning))
