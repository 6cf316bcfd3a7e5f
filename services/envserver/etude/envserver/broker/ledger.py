"""Who holds what where: nodes, leases, and what has ended but may not be gone."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.envserver.broker.queue import BatchKey
from etude.v1 import environments_pb2

LOST_AFTER_S = 3.5
"""Three heartbeats of a second, and half a one for the road."""
REMEMBER_S = 900.0
"""How long an ended lease is remembered, so that a node that missed its end still hears of it."""
SETTLE_S = 5.0
"""A lease younger than this may be missing in a heartbeat that was written before it was opened."""


@dataclass(slots=True, kw_only=True)
class NodeState:
    """One node as its last heartbeat told."""

    node_id: str
    endpoint: str = ""
    driver: str = ""
    isolation: environments_pb2.Isolation = environments_pb2.ISOLATION_UNSPECIFIED
    slots: int = 0
    draining: bool = False
    seen_s: float = 0.0
    opening: int = 0
    """Environments that were ordered and have not answered."""
    is_suspect: bool = False
    """A call failed; nothing is placed here until the next heartbeat."""


@dataclass(slots=True, kw_only=True)
class Granted:
    """One lease."""

    held: environments_pb2.HeldLease
    node_id: str
    granted_s: float

    @property
    def lease(self) -> environments_pb2.Lease:
        """What its holder was given."""
        return self.held.lease

    @property
    def key(self) -> BatchKey:
        """The batch that it was granted to."""
        return BatchKey(self.held.run_id, self.held.idempotency_key)


@dataclass(slots=True, kw_only=True)
class Ended:
    """A lease that nobody holds any more."""

    node_id: str
    ended_s: float
    is_gone: bool
    """Whether its node has closed it; until then it takes a slot."""


class Closing(NamedTuple):
    """Leases that a node shall end."""

    endpoint: str
    lease_ids: list[str]


@dataclass(slots=True)
class Ledger:
    """The broker's whole state. It is rebuilt from heartbeats, so nothing here is ever stored."""

    nodes: dict[str, NodeState] = field(default_factory=dict)
    leases: dict[str, Granted] = field(default_factory=dict)
    granted_total: int = 0
    expired_total: int = 0
    _ended: dict[str, Ended] = field(default_factory=dict)
    _by_key: dict[BatchKey, dict[int, str]] = field(default_factory=dict)
    _lost: dict[str, Granted] = field(default_factory=dict)
    """Leases of nodes that fell silent; they count again when the node comes back with them."""

    def free(self) -> dict[str, int]:
        """Free slots of every node that may get environments."""
        taken = dict.fromkeys(self.nodes, 0)
        for granted in self.leases.values():
            taken[granted.node_id] = taken.get(granted.node_id, 0) + 1
        for ended in self._ended.values():
            if not ended.is_gone:
                taken[ended.node_id] = taken.get(ended.node_id, 0) + 1
        return {
            node.node_id: max(0, node.slots - taken[node.node_id] - node.opening)
            for node in self.nodes.values()
            if not node.draining and not node.is_suspect
        }

    def of_batch(self, key: BatchKey) -> dict[int, Granted]:
        """The living leases of a batch by index."""
        return {index: self.leases[i] for index, i in self._by_key.get(key, {}).items()}

    def grant(self, granted: Granted) -> None:
        """A node has opened it."""
        self._add(granted)
        self.granted_total += 1

    def heartbeat(
        self,
        request: environments_pb2.HeartbeatRequest,
        *,
        now_s: float,
        adopted_until_unix_ms: int = 0,
    ) -> environments_pb2.HeartbeatResponse:
        """Take a node's present state in.

        What the node holds and nobody here knows was granted by a predecessor of this broker; it
        lives until the given time at least.
        """
        node = self.nodes.setdefault(request.node_id, NodeState(node_id=request.node_id))
        node.endpoint = request.endpoint
        node.driver = request.driver
        node.isolation = request.isolation
        node.slots = request.slots
        node.draining = request.draining
        node.seen_s = now_s
        node.is_suspect = False
        answer = environments_pb2.HeartbeatResponse()
        for held in request.held:
            lease_id = held.lease.lease_id
            if lease_id not in self.leases and lease_id not in self._ended:
                self._adopt(held, request.node_id, now_s, adopted_until_unix_ms)
            self._confirm(held, answer)
        self._forget_missing({held.lease.lease_id for held in request.held}, request.node_id, now_s)
        return answer

    def silent_nodes(self, *, now_s: float) -> list[str]:
        """Take nodes out that missed three heartbeats; their leases are lost until they return."""
        silent = [n.node_id for n in self.nodes.values() if now_s - n.seen_s > LOST_AFTER_S]
        for node_id in silent:
            del self.nodes[node_id]
            for granted in [g for g in self.leases.values() if g.node_id == node_id]:
                self._drop(granted)
                self._lost[granted.lease.lease_id] = granted
        return silent

    def renew(self, lease_ids: Iterable[str], *, expires_unix_ms: int, now_s: float) -> list[str]:
        """Push ends; returns the leases that are gone, which never come back after this."""
        missing = []
        for lease_id in lease_ids:
            granted = self.leases.get(lease_id)
            if granted is not None:
                granted.lease.expires_unix_ms = expires_unix_ms
                continue
            missing.append(lease_id)
            lost = self._lost.pop(lease_id, None)
            if lost is not None:
                self._ended[lease_id] = Ended(node_id=lost.node_id, ended_s=now_s, is_gone=True)
        return missing

    def end(self, lease_ids: Iterable[str], *, now_s: float) -> list[Closing]:
        """End leases; returns what their nodes have to be told."""
        closing: dict[str, list[str]] = {}
        for lease_id in lease_ids:
            granted = self.leases.get(lease_id) or self._lost.pop(lease_id, None)
            if granted is None:
                continue
            self._drop(granted)
            node = self.nodes.get(granted.node_id)
            self._ended[lease_id] = Ended(
                node_id=granted.node_id, ended_s=now_s, is_gone=node is None
            )
            if node is not None:
                closing.setdefault(node.endpoint, []).append(lease_id)
        return [Closing(endpoint, ids) for endpoint, ids in closing.items()]

    def expired(self, *, now_unix_ms: int) -> list[str]:
        """Leases whose time is over."""
        over = [i for i, g in self.leases.items() if g.lease.expires_unix_ms <= now_unix_ms]
        self.expired_total += len(over)
        return over

    def abandon(self, lease_ids: Iterable[str], node_id: str, *, now_s: float) -> None:
        """Leases were ordered, and nobody knows whether the node has opened them: it must not."""
        for lease_id in lease_ids:
            self._ended[lease_id] = Ended(node_id=node_id, ended_s=now_s, is_gone=True)

    def gone(self, lease_ids: Iterable[str]) -> None:
        """A node has closed them: their slots are free."""
        for lease_id in lease_ids:
            if lease_id in self._ended:
                self._ended[lease_id].is_gone = True

    def forget(self, *, now_s: float) -> None:
        """Drop what is too long ago to matter."""
        for lease_id, ended in list(self._ended.items()):
            if now_s - ended.ended_s > REMEMBER_S:
                del self._ended[lease_id]
        for lease_id, granted in list(self._lost.items()):
            if now_s - granted.granted_s > REMEMBER_S:
                del self._lost[lease_id]

    def _adopt(
        self,
        held: environments_pb2.HeldLease,
        node_id: str,
        now_s: float,
        least_unix_ms: int,
    ) -> None:
        granted = self._lost.pop(held.lease.lease_id, None)
        if granted is None:
            kept = environments_pb2.HeldLease()
            kept.CopyFrom(held)
            kept.lease.expires_unix_ms = max(held.lease.expires_unix_ms, least_unix_ms)
            granted = Granted(held=kept, node_id=node_id, granted_s=now_s)
        self._add(granted)

    def _confirm(
        self, held: environments_pb2.HeldLease, answer: environments_pb2.HeartbeatResponse
    ) -> None:
        lease_id = held.lease.lease_id
        if lease_id in self._ended:
            answer.close_lease_ids.append(lease_id)
            return
        lease = self.leases[lease_id].lease
        if lease.expires_unix_ms != held.lease.expires_unix_ms:
            answer.renewed.add(lease_id=lease_id, expires_unix_ms=lease.expires_unix_ms)

    def _forget_missing(self, held: set[str], node_id: str, now_s: float) -> None:
        for lease_id, granted in list(self.leases.items()):
            is_settled = now_s - granted.granted_s > SETTLE_S
            if granted.node_id == node_id and lease_id not in held and is_settled:
                self._drop(granted)
        for lease_id, ended in self._ended.items():
            if ended.node_id == node_id and lease_id not in held:
                ended.is_gone = True

    def _add(self, granted: Granted) -> None:
        self.leases[granted.lease.lease_id] = granted
        self._by_key.setdefault(granted.key, {})[granted.held.index] = granted.lease.lease_id

    def _drop(self, granted: Granted) -> None:
        self.leases.pop(granted.lease.lease_id, None)
        indices = self._by_key.get(granted.key, {})
        if indices.get(granted.held.index) == granted.lease.lease_id:
            del indices[granted.held.index]
        if not indices:
            self._by_key.pop(granted.key, None)
