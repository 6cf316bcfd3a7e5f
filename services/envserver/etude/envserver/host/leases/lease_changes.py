"""Changes of a host's leases since the heartbeat that a broker confirmed last."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.v1 import environments_pb2

COMPLETE_EVERY = 60
"""Heartbeats after which all leases are sent again: whatever two sides disagree on ends then."""


class LeaseChanges(NamedTuple):
    """Leases of one heartbeat."""

    base_generation: int
    """The confirmed heartbeat that it builds on; 0: all leases are in it."""
    held: Sequence[environments_pb2.HeldLease]
    """New or changed since."""
    ended_lease_ids: Sequence[str]


@dataclass(slots=True)
class ConfirmedLeases:
    """The leases that one broker has confirmed to know of this host."""

    generation: int = 0
    """Of the confirmed heartbeat; 0 for none."""
    _encoded: dict[str, bytes] = field(default_factory=dict)
    """Each lease as it was sent."""
    _since_complete: int = 0

    def changes(self, held: Iterable[environments_pb2.HeldLease]) -> LeaseChanges:
        """Changes that tell the broker which leases are held now."""
        if not self.generation or self._since_complete >= COMPLETE_EVERY:
            return LeaseChanges(0, list(held), ())
        changed, living = [], set()
        for each in held:
            lease_id = each.lease.lease_id
            living.add(lease_id)
            if self._encoded.get(lease_id) != each.SerializeToString():
                changed.append(each)
        return LeaseChanges(self.generation, changed, sorted(self._encoded.keys() - living))

    def confirm(self, changes: LeaseChanges, sent: Iterable[bytes], generation: int) -> None:
        """Record that the broker took a heartbeat in.

        Args:
            changes: what the heartbeat said.
            sent: its leases as they were encoded: they may have changed meanwhile.
            generation: of the heartbeat.
        """
        if not changes.base_generation:
            self._encoded.clear()
            self._since_complete = 0
        self._since_complete += 1
        for lease_id in changes.ended_lease_ids:
            self._encoded.pop(lease_id, None)
        for each, encoded in zip(changes.held, sent, strict=True):
            self._encoded[each.lease.lease_id] = encoded
        self.generation = generation

    def forget(self) -> None:
        """Send all leases next time."""
        self.generation = 0
