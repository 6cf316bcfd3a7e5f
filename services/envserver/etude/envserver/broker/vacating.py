"""Draining of hosts: they get no more environments, and are removed once they are empty."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from etude.envserver.broker.members import Members

MOST_S = 300.0
"""Longest hold: a drain that is not renewed must not block a host's slots for ever."""


@dataclass(slots=True)
class Vacating:
    """The hosts to drain, as named last, until the hold ends."""

    nodes: Members
    _names: frozenset[str] = frozenset()
    _until_s: float = -math.inf

    def name(self, node_ids: Iterable[str], *, hold_s: float, now_s: float) -> list[str]:
        """Drain these hosts, and stop draining all others.

        Returns:
            Those that hold nothing, and so will hold nothing as long as they are named; unknown
            hosts hold nothing of this broker's runs.
        """
        self._names = frozenset(node_ids)
        self._until_s = now_s + min(hold_s, MOST_S)
        self.look(now_s=now_s)
        found = ((name, self.nodes.get(name)) for name in sorted(self._names))
        return [name for name, node in found if node is None or not node.held]

    def look(self, *, now_s: float) -> None:
        """Mark the hosts that drain now, and record since when each is empty."""
        if now_s >= self._until_s:
            self._names = frozenset()
        for node in self.nodes:
            node.is_vacating = node.node_id in self._names
            if node.held:
                node.idle_since_s = None
            elif node.idle_since_s is None:
                node.idle_since_s = now_s
