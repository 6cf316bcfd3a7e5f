"""Updates of a pool's spec in its broker, and the turns in which its hosts start again."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.common.errors import InvalidFieldError
from etude.common.pools.pool_description import PoolDescription, parse_description
from etude.envserver.broker.broker import Broker

ROLLING_SHARE = 0.1
"""Part of the hosts that may drain for a new spec at once; at least one does."""
TURN_S = 0.5
"""How long a choice of hosts holds: to choose for each heartbeat would take all of a broker."""
PROBLEM_S = 30.0
"""A host that can start no environments says so every ten seconds."""
MAX_PROBLEMS = 64
MAX_PROBLEM = 1_000


@dataclass(slots=True)
class PoolUpdates:
    """The newest description of the pool that a broker serves."""

    broker: Broker
    current: PoolDescription
    _in_turn: frozenset[str] = frozenset()
    _chosen_s: float = -math.inf

    def replace(self, text: str) -> str:
        """Take a newer spec of the same pool; returns its revision.

        Raises:
            InvalidFieldError: it is of another pool.
            UserError: it is no valid pool.
        """
        new, old = parse_description(text, "pool_json"), self.current
        if new.pool.uid != old.pool.uid:
            raise InvalidFieldError("pool_json", f"is of pool {new.pool.uid}, not {old.pool.uid}")
        self.current = new
        self.broker.replace_spec(new.pool.spec)
        return new.revision

    def may_restart(self, node_id: str, revision: str, *, now_s: float) -> bool:
        """True while it is this host's turn to drain for the current spec.

        Args:
            node_id: of the host.
            revision: that it runs with.
            now_s: monotonic time.
        """
        current = self.current.revision
        if revision == current:
            return False
        if now_s - self._chosen_s >= TURN_S:
            hosts = self.broker.ledger.hosts
            outdated = (host.node_id for host in hosts if host.pool_revision != current)
            self._in_turn, self._chosen_s = hosts_in_turn(outdated, count=len(hosts)), now_s
        return node_id in self._in_turn


def hosts_in_turn(outdated: Iterable[str], *, count: int) -> frozenset[str]:
    """Hosts that may drain now.

    Args:
        outdated: names of the hosts that run with another spec.
        count: of all hosts.
    """
    return frozenset(sorted(outdated)[: max(1, math.floor(ROLLING_SHARE * count))])


@dataclass(slots=True)
class HostProblems:
    """Hosts that cannot start environments, as they probed themselves."""

    _found: dict[str, tuple[str, float]] = field(default_factory=dict)

    def record(self, node_id: str, message: str, *, now_s: float) -> None:
        """Record what a host said about itself; an empty message ends it."""
        self._found.pop(node_id, None)
        if message and len(self._found) < MAX_PROBLEMS:
            self._found[node_id] = (message[:MAX_PROBLEM], now_s)

    def current(self, *, now_s: float) -> dict[str, str]:
        """Messages by host, of those that spoke recently."""
        return {
            node_id: message
            for node_id, (message, said_s) in sorted(self._found.items())
            if now_s - said_s <= PROBLEM_S
        }
