"""Preemption by pause: environments wait on their hosts while classes below floors need slots."""

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from etude.envserver.broker.classes.preemption import choose_lenders, slots_owed
from etude.envserver.broker.classes.queues import ClassQueues
from etude.envserver.broker.classes.shares import lease_class
from etude.envserver.broker.host_client import HostCallError, HostClient
from etude.envserver.broker.hosts import HostState, SnapshotKey
from etude.envserver.broker.launch_queue import LaunchBatch
from etude.envserver.broker.lease_ledger import GrantedLease, LeaseLedger

log = logging.getLogger(__name__)

MAX_LAUNCHES = 64
"""Launches of a class for which a host is looked for: more of them need the same hosts."""
RESCAN_S = 0.05
"""Time after which all hosts are looked at again when they did not have enough."""
MAX_ORDERS = 4
"""Orders in flight to one host: each person of a burst may need another slot."""
RESUMED_S = 5.0
"""A resumed environment is among the last to be paused again before this."""
RETRY_S = 0.05
"""A host that could not do all of an order gets none for this long: others are asked meanwhile."""
MOST_RETRY_S = 1.0
"""The same after several such orders, each of which doubles it."""
UNLIMITED = 1 << 30
SHIFT_S = 60.0
"""Longest pause while others of the host run: then they change places, or a rollout that waits for
minutes would be given up by its run."""
MORE_CANDIDATES = 16
"""Environments beyond those wanted, from which a host takes what is between two turns."""


class Rest(NamedTuple):
    """Time in which a host gets no orders."""

    until_s: float
    lasts_s: float


@dataclass(slots=True, kw_only=True)
class Preemptor:
    """Orders to pause and to resume environments. Hosts keep the truth, as of every lease."""

    host_client: HostClient
    ledger: LeaseLedger
    queue: ClassQueues
    spawn: Callable[[Coroutine[Any, Any, None], str], object]
    """Starts a task that ends with the broker."""
    on_change: Callable[[HostState], None]
    """Called when slots of a host may have become free, or more of them may be asked for."""
    _pausing: dict[str, list[frozenset[str]]] = field(default_factory=dict)
    """Leases that hosts shall pause first, of each order that they have not answered."""
    _resuming: set[str] = field(default_factory=set)
    """Hosts that have not answered an order to resume."""
    _rests: dict[str, Rest] = field(default_factory=dict)
    """Of hosts that could not do all of an order."""
    _rescan_s: float = -math.inf

    def num_spare(self, *, now_s: float) -> int:
        """Free slots that are not reserved, which any class may take."""
        reserved = self.queue.num_reserved(now_s=now_s)
        # Most pools have no floors, and need no look at every host.
        return max(0, self.ledger.num_free - reserved) if reserved else UNLIMITED

    def preempt(self, *, now_s: float) -> None:
        """Pause as many environments as classes below their floors lack, or will lack soon."""
        shares, brokers = self.queue.shares, self.queue.num_brokers()
        held, waiting = self.queue.count_held(), self.queue.count_waiting()
        # What waits although slots are free cannot use those.
        owed = slots_owed(shares, held, waiting, brokers=brokers)
        asked = sum(len(each) for orders in self._pausing.values() for each in orders)
        wanted = max(owed.total(), self._num_lacking(now_s)) - asked
        if wanted <= 0 or now_s < self._rescan_s:
            return
        lenders = choose_lenders(shares, held, wanted, brokers=brokers)
        served = [
            batch
            for each in owed
            for batch in itertools.islice(self.queue.batches_of(each), MAX_LAUNCHES)
        ]
        for host in self.ledger.hosts:
            is_needed = not served or any(_needs(host, each) for each in served)
            if is_needed and self._can_ask(host, now_s=now_s):
                self._preempt_on(host, lenders, now_s=now_s)
            if not lenders.total():
                return
        self._rescan_s = now_s + RESCAN_S

    def rotate(self, *, now_s: float) -> None:
        """Pause others in place of environments that have waited for long, which resume then."""
        if not self.ledger.slots.num_preempted:
            return
        leases, brokers = self.ledger.leases, self.queue.num_brokers()
        for host in self.ledger.hosts:
            overdue = sum(now_s - leases[each].switched_s >= SHIFT_S for each in host.preempted)
            if overdue and self._can_ask(host, now_s=now_s):
                held = self.queue.count_held()
                lenders = choose_lenders(self.queue.shares, held, overdue, brokers=brokers)
                self._preempt_on(host, lenders, now_s=now_s, least_s=SHIFT_S)

    def resume(self, hosts: Iterable[HostState], *, spare: int, now_s: float) -> int:
        """Resume preempted environments where slots are free, the first paused first.

        Args:
            hosts: to look at.
            spare: most environments to resume, as other free slots are reserved.
            now_s: monotonic time.

        Returns:
            Number of the environments whose hosts were asked.
        """
        left = spare
        for host in hosts:
            if not (left > 0 and host.preempted and host.free) or host.is_suspect:
                continue
            if host.node_id in self._resuming or self._is_resting(host, now_s=now_s):
                continue
            lease_ids = list(host.preempted)[: min(left, host.free)]
            left -= len(lease_ids)
            host.opening += len(lease_ids)
            self._resuming.add(host.node_id)
            self.spawn(self._resume(host, lease_ids, now_s), f"resume on {host.node_id}")
        return spare - left

    def _num_lacking(self, now_s: float) -> int:
        """Slots that should be free and are not, nor will be once ended leases are closed."""
        reserved = self.queue.num_reserved(now_s=now_s)
        if not reserved:
            return 0
        hosts = (host for host in self.ledger.hosts if host.is_open)
        return reserved - sum(host.free + len(host.closing) for host in hosts)

    def _can_ask(self, host: HostState, *, now_s: float) -> bool:
        is_busy = len(self._pausing.get(host.node_id, ())) >= MAX_ORDERS
        is_able = host.can_preempt and host.is_open and not is_busy
        return is_able and not self._is_resting(host, now_s=now_s)

    def _is_resting(self, host: HostState, *, now_s: float) -> bool:
        rest = self._rests.get(host.node_id)
        if rest is not None and now_s - rest.until_s > MOST_RETRY_S:
            del self._rests[host.node_id]
        return rest is not None and now_s < rest.until_s

    def _start_rest(self, host: HostState, *, now_s: float) -> float:
        """Let a host rest after an order that it could not do; returns for how long."""
        rest = self._rests.get(host.node_id)
        lasts_s = RETRY_S if rest is None else min(MOST_RETRY_S, 2 * rest.lasts_s)
        self._rests[host.node_id] = Rest(now_s + lasts_s, lasts_s)
        return lasts_s

    def _preempt_on(
        self, host: HostState, lenders: Counter[int], *, now_s: float, least_s: float = 0.0
    ) -> None:
        """Order a host to pause environments of one class that gives up slots, the newest first.

        Args:
            host: to ask.
            lenders: slots that each class gives up; those of the order are deducted.
            now_s: monotonic time.
            least_s: time for which they have run since they were resumed.
        """
        asked = frozenset[str]().union(*self._pausing.get(host.node_id, ()))
        leases = (self.ledger.leases[each] for each in host.leases - asked)
        running = [
            each
            for each in leases
            if not each.held.preempted and now_s - each.switched_s >= least_s
        ]
        running.sort(key=lambda each: _preemption_order(each, now_s=now_s))
        for lender, slots in lenders.items():
            found = [each for each in running if lease_class(each.held.lease_class) == lender]
            count = min(slots, len(found))
            if count:
                lenders[lender] -= count
                lease_ids = [each.lease.lease_id for each in found[: count + MORE_CANDIDATES]]
                self._pausing.setdefault(host.node_id, []).append(frozenset(lease_ids[:count]))
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
            self._pausing[host.node_id].remove(frozenset(lease_ids[:count]))
        self._rescan_s = -math.inf
        for lease_id in paused:
            self.ledger.set_preempted(lease_id, is_preempted=True, now_s=now_s)
        if paused:
            log.info("%d leases on %s wait for other classes", len(paused), host.node_id)
        if len(paused) < count:
            rest_s = self._start_rest(host, now_s=now_s)
            self.on_change(host)
            await asyncio.sleep(rest_s)
        else:
            self._rests.pop(host.node_id, None)
        # More may have come meanwhile, and asked for other slots of this host.
        self.on_change(host)

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
            self._start_rest(host, now_s=now_s)
        for lease_id in resumed:
            self.ledger.set_preempted(lease_id, is_preempted=False, now_s=now_s)
        self.on_change(host)


def _preemption_order(granted: GrantedLease, *, now_s: float) -> tuple[bool, float, str]:
    """Sort key of leases: those that have not just been resumed first, of them the newest."""
    has_resumed = now_s - granted.switched_s < RESUMED_S
    return has_resumed, -granted.granted_s, granted.lease.lease_id


def _needs(host: HostState, batch: LaunchBatch) -> bool:
    """True if a host could take environments of a batch, but for the slots or the memory."""
    line = batch.placement_class
    if line.snapshot_id and SnapshotKey(batch.key.run_id, line.snapshot_id) not in host.snapshots:
        return False
    return not host.readiness(line.template).quarantined and not host.takes(line.template)
