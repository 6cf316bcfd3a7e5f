"""Counts of leases by the slots that they take."""

from collections import Counter
from dataclasses import dataclass, field

from etude.envserver.broker.classes.shares import lease_class
from etude.envserver.broker.hosts import HostState
from etude.v1 import environments_pb2


@dataclass(slots=True)
class SlotCounts:
    """Living leases by class, and those that are preempted."""

    by_class: Counter[int] = field(default_factory=Counter)
    """Leases that take a slot."""
    num_preempted: int = 0
    """Leases that take none."""

    def count(self, held: environments_pb2.HeldLease, host: HostState | None, change: int) -> None:
        """Count a lease (1), or count it no more (-1)."""
        if not held.preempted:
            self.by_class[lease_class(held.lease_class)] += change
            return
        self.num_preempted += change
        if host is not None:
            host.preempted.pop(held.lease.lease_id, None)
            if change > 0:
                host.preempted[held.lease.lease_id] = None
