"""Preemption by pause: environments wait on their hosts while classes below floors have slots."""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.envserver.broker.classes.preemption import choose_lenders, slots_owed
from etude.envserver.broker.classes.queues import ClassQueues
from etude.envserver.broker.classes.shares import lease_class
from etude.envserver.broker.host_client import HostCallError, HostClient
from etude.envserver.broker.hosts import HostState, SnapshotKey
from etude.envserver.broker.launch_queue import LaunchBatch
from etude.envserver.broker.lease_ledger import LeaseLedger

log = logging.getLogger(__name__)

MAX_LAUNCHES = 64
"""Launches of a class for which a host is looked for: more of them need the same hosts."""
RESCAN_S = 0.05
"""Time after which all hosts are looked at again when they did not have enough."""
RESUMED_S = 5.0
"""A resumed environment is not paused again before this: what cannot be placed pauses few."""
RETRY_S = 0.2
"""A host that could not do all of an order gets none for this long: others are asked meanwhile."""
MORE_CANDIDATES = 16
"""Environments beyond those wanted, from which a host takes what is between two turns."""


@dataclass(slots=True, kw_only=True)
class Preemptor:
    """Orders to pause and to resume environments. Hosts keep the truth, as of every lease."""

    host_client: HostClient
    ledger: LeaseLedger
    queue: ClassQueues
    spawn: Callable[[Coroutine[Any, Any, None], str], object]
    """Starts a task that ends with the broker."""
    on_capacity: Callable[[HostState], None]
    """Called when slots of a host have become free."""
    _pausing: dict[str, int] = field(default_factory=dict)
    """Slots that hosts were asked for and have not answered, by host."""
    _resuming: set[str] = field(default_factory=set)
    """Hosts that have not answered an order to resume."""
    _retry_s: dict[str, float] = field(default_factory=dict)
    """When hosts may be asked again that could not do all of an order."""
    _rescan_s: float = -math.inf

    def preempt(self, *, now_s: float) -> None:
        """Pause as many environments as classes that wait below their floors lack."""
        shares, brokers = self.queue.shares, self.queue.num_brokers()
        held, waiting = self.queue.count_held(), self.queue.count_waiting()
        owed = slots_owed(shares, held, waiting, brokers=brokers)
        wanted = owed.total() - sum(self._pausing.values())
        if wanted <= 0 or now_s < self._rescan_s:
            return
        lenders = choose_lenders(shares, held, wanted, brokers=brokers)
        served = [
            batch
            for each in owed
            for batch in itertools.islice(self.queue.batches_of(each), MAX_LAUNCHES)
        ]
        for host in self.ledger.hosts:
            if not lenders.total():
                return
            if self._can_ask(host, now_s=now_s) and any(_needs(host, each) for each in served):
                self._preempt_on(host, lenders, now_s=now_s)
        self._rescan_s = now_s + RESCAN_S

    def resume(self, hosts: Iterable[HostState], *, now_s: float) -> None:
        """Resume preempted environments where slots are free, the first paused first."""
        for host in hosts:
            if not (host.preempted and host.free) or host.is_suspect:
                continue
            if host.node_id in self._resuming or self._rests(host, now_s=now_s):
                continue
            lease_ids = list(host.preempted)[: host.free]
            host.opening += len(lease_ids)
            self._resuming.add(host.node_id)
            self.spawn(self._resume(host, lease_ids, now_s), f"resume on {host.node_id}")

    def _can_ask(self, host: HostState, *, now_s: float) -> bool:
        is_asked = host.node_id in self._pausing or self._rests(host, now_s=now_s)
        return host.can_preempt and host.is_open and not is_asked

    def _rests(self, host: HostState, *, now_s: float) -> bool:
        if self._retry_s.get(host.node_id, now_s) > now_s:
            return True
        self._retry_s.pop(host.node_id, None)
        return False

    def _preempt_on(self, host: HostState, lenders: Counter[int], *, now_s: float) -> None:
        """Order a host to pause environments of one class that gives up slots, the newest first."""
        leases = (self.ledger.leases[each] for each in host.leases)
        rested = [
            each
            for each in leases
            if not each.held.preempted and now_s - each.resumed_s >= RESUMED_S
        ]
        rested.sort(key=lambda each: (-each.granted_s, each.lease.lease_id))
        for lender, slots in lenders.items():
            found = [each for each in rested if lease_class(each.held.lease_class) == lender]
            count = min(slots, len(found))
            if count:
                lenders[lender] -= count
                self._pausing[host.node_id] = count
                lease_ids = [each.lease.lease_id for each in found[: count + MORE_CANDIDATES]]
                order = self._preempt(host, lease_ids, count, now_s)
                self.spawn(order, f"preempt on {host.node_id}")
                return

    async def _preempt(
        self, host: HostState, lease_ids: Sequence[str], count: int, now_s: float
    ) -> None:
        paused: Sequence[str] = ()
        try:
            paused = await self.host_client.preempt(host.endpoint, lease_ids, count)
        except HostCallError as error:
            # What it has paused all the same, its next heartbeat says.
            log.warning("host %s pauses nothing: %s", host.node_id, error)
        finally:
            del self._pausing[host.node_id]
        if len(paused) < count:
            self._retry_s[host.node_id] = now_s + RETRY_S
        for lease_id in paused:
            self.ledger.set_preempted(lease_id, is_preempted=True, now_s=now_s)
        if paused:
            log.info("%d leases on %s wait for other classes", len(paused), host.node_id)
            self.on_capacity(host)

    async def _resume(self, host: HostState, lease_ids: Sequence[str], now_s: float) -> None:
        resumed: Sequence[str] = ()
        try:
            resumed = await self.host_client.resume(host.endpoint, lease_ids)
        except HostCallError as error:
            log.warning("host %s resumes nothing: %s", host.node_id, error)
        finally:
            self._resuming.discard(host.node_id)
            host.opening -= len(lease_ids)
        if len(resumed) < len(lease_ids):
            self._retry_s[host.node_id] = now_s + RETRY_S
        for lease_id in resumed:
            self.ledger.set_preempted(lease_id, is_preempted=False, now_s=now_s)
        self.on_capacity(host)


def _needs(host: HostState, batch: LaunchBatch) -> bool:
    """True if a host could take environments of a batch, but for the slots or the memory."""
    line = batch.placement_class
    if line.snapshot_id and SnapshotKey(batch.key.run_id, line.snapshot_id) not in host.snapshots:
        return False
    return not host.readiness(line.template).quarantined and not host.takes(line.template)
