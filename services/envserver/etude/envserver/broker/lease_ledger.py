"""Ledger of leases: active, ended, lost and adopted ones, by lease, batch, run and host."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.tls.lease_owner import refuse_other_owner
from etude.envserver.broker.classes.slot_counts import SlotCounts
from etude.envserver.broker.hosts import Closing, Hosts, HostState, answer_heartbeat
from etude.envserver.broker.launch_queue import BatchKey
from etude.v1 import environments_pb2

LOST_AFTER_S = 3.5
"""Three heartbeats of a second, and half a second for the network."""
REMEMBER_S = 900.0
"""How long an ended lease is remembered, so that a host that missed its end still hears of it."""
SETTLE_S = 5.0
"""A lease younger than this may be missing in a heartbeat that was written before it was opened."""
AGE_STEP_S = 10
"""Resolution of lease ages in reports."""
_NEVER_UNIX_MS = 1 << 62


class AgeClass(NamedTuple):
    """Leases of one template that began at about one time."""

    template: str
    step: float
    """Of AGE_STEP_S on the monotonic clock."""


@dataclass(slots=True, kw_only=True)
class GrantedLease:
    """One lease."""

    held: environments_pb2.HeldLease
    node_id: str
    granted_s: float
    template: str = ""
    """Empty for leases that a predecessor granted."""
    lost_s: float = 0.0
    """When its host fell silent, once it has."""
    key: BatchKey = field(init=False)
    """The batch that it was granted to."""
    end_s: int = 0
    """Second since 1970 under which the ledger finds its end."""
    first_end_unix_ms: int = field(init=False)
    """Its end when it was granted, or as its host reported it first."""
    age_class: AgeClass = field(init=False)
    """Under which the ledger counts it while it lives."""
    switched_s: float = -math.inf
    """When it was preempted or resumed last."""
    is_claimed: bool = False
    """True once this broker gave it to its holder, or its holder renewed it here."""

    def __post_init__(self) -> None:
        self.key = BatchKey(self.held.run_id, self.held.idempotency_key)
        self.first_end_unix_ms = self.held.lease.expires_unix_ms

    @property
    def lease(self) -> environments_pb2.Lease:
        """The lease as its holder has it."""
        return self.held.lease


@dataclass(slots=True)
class LeaseLedger:
    """The broker's whole state. It is rebuilt from heartbeats, so nothing here is ever stored.

    Each lease that was granted or adopted is active, or was released, expired, lost or moved: the
    counts add up at any time.
    """

    hosts: Hosts = field(default_factory=Hosts)
    leases: dict[str, GrantedLease] = field(default_factory=dict)
    granted_total: int = 0
    adopted_total: int = 0
    """Leases that a predecessor granted, or of hosts that were lost and came back."""
    released_total: int = 0
    expired_total: int = 0
    lost_total: int = 0
    """Leases whose hosts fell silent or no longer knew them."""
    moved_total: int = 0
    """Leases whose hosts belong to another broker now."""
    lasted_s: list[float] = field(default_factory=list)
    """Durations of leases that ended since the last tick."""
    adopted: list[GrantedLease] = field(default_factory=list)
    """Leases adopted since the broker last gave such leases to waiting requests."""
    began: Counter[AgeClass] = field(default_factory=Counter)
    """Living leases by template and age."""
    _ended: dict[str, float] = field(default_factory=dict)
    """When leases ended, oldest first."""
    _over: dict[str, int] = field(default_factory=dict)
    """Expiry in Unix milliseconds, of the ended leases that had expired."""
    _by_key: dict[BatchKey, dict[int, str]] = field(default_factory=dict)
    _of_run: dict[str, int] = field(default_factory=dict)
    slots: SlotCounts = field(default_factory=SlotCounts)
    _lost: dict[str, GrantedLease] = field(default_factory=dict)
    """Leases of hosts that fell silent; they count again when the host comes back with them."""
    _ends: dict[int, set[str]] = field(default_factory=dict)
    """Leases by the second of their ends; a renewed one is moved when its old end comes."""

    @property
    def num_free(self) -> int:
        """Free slots of all hosts that may get environments."""
        return sum(host.free for host in self.hosts if host.is_open)

    def of_batch(self, key: BatchKey) -> dict[int, GrantedLease]:
        """The living leases of a batch by index."""
        return {index: self.leases[i] for index, i in self._by_key.get(key, {}).items()}

    @property
    def by_run(self) -> Mapping[str, int]:
        """Leases that each run holds."""
        return self._of_run

    def of_run(self, run_id: str) -> int:
        """Leases that a run holds."""
        return self._of_run.get(run_id, 0)

    def run_of(self, lease_id: str) -> str | None:
        """Run of a living or lost lease; None if there is no such lease."""
        granted = self.leases.get(lease_id) or self._lost.get(lease_id)
        return None if granted is None else granted.key.run_id

    def split_known(self, lease_ids: Iterable[str], owner: str = "") -> tuple[list[str], list[str]]:
        """The living leases among some, and the others; those of another owner are refused."""
        known, unknown = list[str](), list[str]()
        for lease_id in lease_ids:
            run_id = self.run_of(lease_id)
            if run_id is not None:
                refuse_other_owner(owner, lease_id, run_id)
            (known if lease_id in self.leases else unknown).append(lease_id)
        return known, unknown

    def grant(self, granted: GrantedLease) -> None:
        """Enter a lease that a host has opened.

        The host's heartbeat may have reported the lease before its answer came, as one of unknown
        origin: it is one lease all the same, and ends when its holder was told.
        """
        known = self.leases.get(granted.lease.lease_id)
        if known is not None:
            self._drop(known)
            self.adopted_total -= 1
        granted.is_claimed = True
        self._add(granted)
        self.granted_total += 1

    def heartbeat(
        self,
        request: environments_pb2.HeartbeatRequest,
        *,
        now_s: float,
        adopted_until_unix_ms: int = 0,
    ) -> environments_pb2.HeartbeatResponse:
        """Take in the present state of a host, whole or as changes of a state that is known here.

        A lease that the host holds and that is unknown here was granted by a predecessor of this
        broker; it lives until the given time at least.
        """
        if self.hosts.is_outdated(request) or not self.hosts.knows_base(request):
            return environments_pb2.HeartbeatResponse()
        host = self.hosts.apply_heartbeat(request, now_s=now_s)
        host.update_reported(request)
        for held in request.held:
            lease_id = held.lease.lease_id
            granted = self.leases.get(lease_id)
            if held.lease.expires_unix_ms > self._over.get(lease_id, _NEVER_UNIX_MS):
                # Its host had kept it, and its holder has resumed it there.
                del self._ended[lease_id], self._over[lease_id]
            elif granted is None and lease_id not in self._ended:
                self._settle_claim(held, now_s)
            if granted is None and lease_id not in self._ended:
                granted = self._adopt(held, host.node_id, now_s, adopted_until_unix_ms)
            if granted is not None and granted.node_id == host.node_id:
                host.renewed[lease_id] = granted.lease.expires_unix_ms
                if granted.lease.expires_unix_ms == held.lease.expires_unix_ms:
                    del host.renewed[lease_id]
                self.set_preempted(lease_id, is_preempted=held.preempted, now_s=now_s)
        # Those that ended, or live on another host: a lease is never on two.
        host.closing = host.reported - host.leases
        self._forget_missing(host, now_s)
        return answer_heartbeat(host)

    def remove_silent_hosts(self, *, now_s: float) -> list[str]:
        """Remove hosts that missed three heartbeats; their leases are lost until they return."""
        silent = [host for host in self.hosts if now_s - host.seen_s > LOST_AFTER_S]
        for host in silent:
            for lease_id in list(host.leases):
                granted = self.leases[lease_id]
                self._drop(granted)
                self.lost_total += 1
                granted.lost_s = now_s
                self._lost[lease_id] = granted
            self.hosts.remove(host)
        return [host.node_id for host in silent]

    def lost_since(self, since_s: float) -> list[GrantedLease]:
        """Leases whose hosts have fallen silent since a time."""
        return [lost for lost in self._lost.values() if lost.lost_s >= since_s]

    def move_host(self, request: environments_pb2.HeartbeatRequest) -> None:
        """Forget a host that belongs to another broker now, which has its leases."""
        host = self.hosts.get(request.node_id)
        # It may have come back before this was read.
        if host is None or self.hosts.is_outdated(request):
            return
        for lease_id in list(host.leases):
            self._drop(self.leases[lease_id])
            self.moved_total += 1
        self.hosts.remove(host)

    def renew(self, lease_ids: Iterable[str], *, expires_unix_ms: int, now_s: float) -> list[str]:
        """Extend leases; returns those that are gone, which never come back after this."""
        missing = []
        for lease_id in lease_ids:
            granted = self.leases.get(lease_id)
            if granted is not None:
                granted.is_claimed = True
                granted.lease.expires_unix_ms = expires_unix_ms
                host = self.hosts.get(granted.node_id)
                if host is not None:
                    host.renewed[lease_id] = expires_unix_ms
                if expires_unix_ms // 1000 < granted.end_s:
                    self._move_end(granted)
                continue
            missing.append(lease_id)
            lost = self._lost.pop(lease_id, None)
            if lost is not None:
                self._ended[lease_id] = now_s
        return missing

    def set_preempted(self, lease_id: str, *, is_preempted: bool, now_s: float) -> None:
        """Record that a lease takes no slot, or takes one again."""
        granted = self.leases.get(lease_id)
        if granted is not None and granted.held.preempted != is_preempted:
            host = self.hosts.get(granted.node_id)
            self.slots.count(granted.held, host, -1)
            granted.held.preempted = is_preempted
            self.slots.count(granted.held, host, 1)
            granted.switched_s = now_s

    def end(self, lease_ids: Iterable[str], *, now_s: float) -> list[Closing]:
        """End leases that their holders released; returns the orders for their hosts."""
        return self._close(lease_ids, now_s=now_s, is_over=False)

    def expire(self, *, now_unix_ms: int, now_s: float) -> list[Closing]:
        """End the leases whose time is over; returns the orders for their hosts."""
        over = []
        for end_s in sorted(end_s for end_s in self._ends if end_s <= now_unix_ms // 1000):
            for lease_id in sorted(self._ends[end_s]):
                granted = self.leases[lease_id]
                if granted.lease.expires_unix_ms <= now_unix_ms:
                    over.append(lease_id)
                else:
                    self._move_end(granted)
        return self._close(over, now_s=now_s, is_over=True)

    def disown(self, lease_ids: Iterable[str], *, now_s: float) -> None:
        """Mark ordered leases as ended: their host may have opened them, and must close them."""
        self._ended.update(dict.fromkeys(lease_ids, now_s))

    def confirm_closed(self, node_id: str, lease_ids: Iterable[str]) -> None:
        """Free the slots of leases that a host has closed."""
        host = self.hosts.get(node_id)
        if host is not None:
            host.closing.difference_update(lease_ids)

    def forget_old(self, *, now_s: float) -> None:
        """Forget leases that ended too long ago to matter."""
        while self._ended:
            lease_id, ended_s = next(iter(self._ended.items()))
            if now_s - ended_s <= REMEMBER_S:
                break
            del self._ended[lease_id]
            self._over.pop(lease_id, None)
        for lease_id, granted in list(self._lost.items()):
            if now_s - granted.lost_s > REMEMBER_S:
                del self._lost[lease_id]

    def _close(self, lease_ids: Iterable[str], *, now_s: float, is_over: bool) -> list[Closing]:
        closing: dict[str, list[str]] = {}
        for lease_id in lease_ids:
            granted = self.leases.get(lease_id)
            if granted is not None:
                self._drop(granted)
                self.expired_total += is_over
                if is_over:
                    self._over[lease_id] = granted.lease.expires_unix_ms
                self.released_total += not is_over
                self.lasted_s.append(now_s - granted.granted_s)
            else:
                granted = self._lost.pop(lease_id, None)
            if granted is None:
                continue
            self._ended[lease_id] = now_s
            host = self.hosts.get(granted.node_id)
            if host is not None:
                host.closing.add(lease_id)
                closing.setdefault(host.node_id, []).append(lease_id)
        return [
            Closing(host.node_id, host.endpoint, closing[host.node_id])
            for host in map(self.hosts.get, closing)
            if host is not None
        ]

    def _adopt(
        self, held: environments_pb2.HeldLease, node_id: str, now_s: float, least_unix_ms: int
    ) -> GrantedLease:
        granted = self._lost.pop(held.lease.lease_id, None)
        if granted is None:
            kept = environments_pb2.HeldLease()
            kept.CopyFrom(held)
            granted = GrantedLease(held=kept, node_id=node_id, granted_s=now_s)
            granted.lease.expires_unix_ms = max(held.lease.expires_unix_ms, least_unix_ms)
        granted.node_id = node_id
        self._add(granted)
        self.adopted_total += 1
        self.adopted.append(granted)
        return granted

    def _settle_claim(self, held: environments_pb2.HeldLease, now_s: float) -> None:
        """End one of two leases of one request, which was served again while a host was silent.

        The holder has the one that this broker gave it. Of two that a predecessor granted, it has
        the one that ends last, because that was granted last.
        """
        lease_id = held.lease.lease_id
        other_id = self._by_key.get(BatchKey(held.run_id, held.idempotency_key), {}).get(held.index)
        if other_id is None:
            return
        other, lost = self.leases[other_id], self._lost.get(lease_id)
        is_claimed = lost is not None and lost.is_claimed
        is_later = held.lease.expires_unix_ms > other.first_end_unix_ms
        if other.is_claimed or not (is_claimed or is_later):
            self._lost.pop(lease_id, None)
            self._ended[lease_id] = now_s
            return
        self._drop(other)
        self.lost_total += 1
        self._ended[other_id] = now_s
        host = self.hosts.get(other.node_id)
        if host is not None:
            host.closing.add(other_id)

    def _forget_missing(self, host: HostState, now_s: float) -> None:
        for lease_id in host.leases - host.reported:
            granted = self.leases[lease_id]
            if now_s - granted.granted_s > SETTLE_S:
                self._drop(granted)
                self.lost_total += 1

    def _add(self, granted: GrantedLease) -> None:
        lease_id = granted.lease.lease_id
        self.leases[lease_id] = granted
        self._by_key.setdefault(granted.key, {})[granted.held.index] = lease_id
        self._of_run[granted.key.run_id] = self.of_run(granted.key.run_id) + 1
        granted.end_s = granted.lease.expires_unix_ms // 1000
        self._ends.setdefault(granted.end_s, set()).add(lease_id)
        host = self.hosts.get(granted.node_id)
        if host is not None:
            host.leases.add(lease_id)
        self.slots.count(granted.held, host, 1)
        granted.age_class = AgeClass(granted.template, granted.granted_s // AGE_STEP_S)
        self.began[granted.age_class] += 1

    def _drop(self, granted: GrantedLease) -> None:
        lease_id, key = granted.lease.lease_id, granted.key
        del self.leases[lease_id]
        self._forget_end(granted)
        indices = self._by_key.get(key, {})
        if indices.get(granted.held.index) == lease_id:
            del indices[granted.held.index]
        if not indices:
            self._by_key.pop(key, None)
        self._of_run[key.run_id] -= 1
        if not self._of_run[key.run_id]:
            del self._of_run[key.run_id]
        host = self.hosts.get(granted.node_id)
        if host is not None:
            host.leases.discard(lease_id)
            host.renewed.pop(lease_id, None)
        self.slots.count(granted.held, host, -1)
        self.began[granted.age_class] -= 1
        if not self.began[granted.age_class]:
            del self.began[granted.age_class]

    def _move_end(self, granted: GrantedLease) -> None:
        self._forget_end(granted)
        granted.end_s = granted.lease.expires_unix_ms // 1000
        self._ends.setdefault(granted.end_s, set()).add(granted.lease.lease_id)

    def _forget_end(self, granted: GrantedLease) -> None:
        same = self._ends[granted.end_s]
        same.discard(granted.lease.lease_id)
        if not same:
            del self._ends[granted.end_s]
