"""Hosts of a pool as of their newest heartbeats, less the orders since; draining of hosts."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.envserver.broker.start_costs import UNREPORTED, StartCost, TemplateReadiness
from etude.v1 import environments_pb2

MAX_OPENING = 32
"""Orders in flight to one host: the first run must not take all slots before others are heard."""
CLONE_BYTES = 18 << 20
"""Memory of a restored environment that has done little yet."""


class SnapshotKey(NamedTuple):
    """Key of a snapshot: two runs may have chosen the same id."""

    run_id: str
    snapshot_id: str


class Closing(NamedTuple):
    """Leases that a host has to end."""

    node_id: str
    endpoint: str
    lease_ids: list[str]


@dataclass(slots=True, kw_only=True)
class HostState:
    """One host."""

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
    """True after a failed call: nothing is placed here until the next heartbeat."""
    is_draining: bool = False
    """True if its pool removes it as soon as it is empty."""
    idle_since_s: float | None = None
    """Start of its idle time; None while it holds something."""
    leases: set[str] = field(default_factory=set)
    preempted: dict[str, None] = field(default_factory=dict)
    """Those of its leases that take no slot, the first paused first."""
    can_preempt: bool = False
    """True if its driver can pause environments."""
    closing: set[str] = field(default_factory=set)
    """Ended leases that it may still hold."""
    generation: int = 0
    """Of its newest heartbeat."""
    reported: set[str] = field(default_factory=set)
    """Leases that it holds, by its heartbeats."""
    renewed: dict[str, int] = field(default_factory=dict)
    """Ends in Unix milliseconds that it has not reported yet, by lease."""
    readiness_by_template: dict[str, TemplateReadiness] = field(default_factory=dict)
    started_templates: set[str] = field(default_factory=set)
    """Templates of which an environment has started here."""
    snapshots: frozenset[SnapshotKey] = frozenset()
    images: frozenset[str] = frozenset()
    """Digests of the images of tasks that it has or pulls."""
    pulled_images: frozenset[str] = frozenset()
    """Digests of those that it does not have yet."""
    queue_ms: float = 0.0
    """Time until the ordered environments have started."""
    memory_bytes: int | None = None
    """Memory for new environments; None if not reported."""
    pool_revision: str = ""
    """Of the pool's spec that it runs with."""

    @property
    def free(self) -> int:
        return max(0, self.slots - self.num_held + len(self.preempted))

    @property
    def is_open(self) -> bool:
        """True if it may get environments at all."""
        return not self.draining and not self.is_suspect and not self.is_draining

    @property
    def num_held(self) -> int:
        """Environments that it holds, opens or closes."""
        return len(self.leases) + len(self.closing) + self.opening

    @property
    def is_busy(self) -> bool:
        """True if further orders have to wait for its answers."""
        return self.opening >= MAX_OPENING

    def readiness(self, template: str) -> TemplateReadiness:
        return self.readiness_by_template.get(template, UNREPORTED)

    def cost(self, template: str) -> StartCost:
        """Cost of one more environment here."""
        return self.readiness(template).cost

    def takes(self, template: str, count: int = 1) -> bool:
        """True if this many environments of a template fit."""
        return (
            self.is_open
            and self.free >= count
            and (self.memory_bytes is None or self.memory_bytes >= count * CLONE_BYTES)
            and not self.readiness(template).quarantined
        )

    def apply_heartbeat(self, told: environments_pb2.HeartbeatRequest, *, now_s: float) -> None:
        """Replace its state by the newest one, which includes all but the latest orders."""
        self.endpoint = told.endpoint
        self.driver = told.driver
        self.isolation = told.isolation
        self.slots = told.slots
        self.draining = told.draining
        self.can_preempt = told.can_preempt
        self.seen_s = now_s
        self.is_suspect = False
        self.queue_ms = float(told.queue_ms)
        self.memory_bytes = told.free_memory_bytes or None
        self.pool_revision = told.pool_revision
        self.readiness_by_template = {
            level.template: TemplateReadiness.from_message(level) for level in told.levels
        }

    def update_reported(self, told: environments_pb2.HeartbeatRequest) -> None:
        """Update the leases that it holds, of a heartbeat whose base is known."""
        if not told.base_generation:
            self.reported.clear()
        self.reported.difference_update(told.ended_lease_ids)
        self.reported.update(held.lease.lease_id for held in told.held)
        self.generation = told.generation

    def reserve(self, template: str) -> None:
        """Deduct one environment that will be ordered here."""
        level = self.readiness(template)
        self.opening += 1
        self.queue_ms += level.cost.cpu_ms
        if self.memory_bytes is not None:
            self.memory_bytes -= CLONE_BYTES
        level.count_start()

    def settle_order(self, count: int, cpu_ms: float) -> None:
        self.opening -= count
        self.queue_ms = max(0.0, self.queue_ms - cpu_ms)


def answer_heartbeat(host: HostState) -> environments_pb2.HeartbeatResponse:
    """Tell a host which of its leases to end, and the new ends of others."""
    renewed = [
        environments_pb2.LeaseExpiry(lease_id=lease_id, expires_unix_ms=expires)
        for lease_id, expires in host.renewed.items()
        if lease_id in host.reported and lease_id in host.leases
    ]
    return environments_pb2.HeartbeatResponse(
        generation=host.generation, close_lease_ids=sorted(host.closing), renewed=renewed
    )


@dataclass(slots=True)
class Hosts:
    """All hosts in rotation, and the holders of each snapshot."""

    _by_id: dict[str, HostState] = field(default_factory=dict)
    _order: list[HostState] = field(default_factory=list)
    """The same hosts, to draw from."""
    _holders: dict[SnapshotKey, dict[str, str]] = field(default_factory=dict)
    """By snapshot, the template that each holder reports, by host."""
    _image_holders: dict[str, dict[str, None]] = field(default_factory=dict)
    """Hosts by the digest of an image of tasks, in the order in which they told of it."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[HostState]:
        return iter(self._order)

    def __getitem__(self, place: int) -> HostState:
        return self._order[place]

    def get(self, node_id: str) -> HostState | None:
        return self._by_id.get(node_id)

    @property
    def opening(self) -> int:
        """Environments that were ordered and have not answered."""
        return sum(host.opening for host in self._order)

    def explain_no_host(self, template: str) -> str:
        """The reason why no host takes an environment of a template."""
        if not self._order:
            return "no host is in rotation"
        crashing = [host for host in self._order if host.readiness(template).quarantined]
        if len(crashing) == len(self._order):
            why = crashing[0].readiness(template).quarantined
            return f"template {template!r} is quarantined on every host: {why}"
        slots = sum(host.slots for host in self._order)
        return f"no slot became free in time; this pool has {slots} on {len(self._order)} hosts"

    def is_outdated(self, told: environments_pb2.HeartbeatRequest) -> bool:
        """True if a later heartbeat of the same host has been taken in."""
        host = self._by_id.get(told.node_id)
        return host is not None and 0 < told.generation < host.generation

    def knows_base(self, told: environments_pb2.HeartbeatRequest) -> bool:
        """True if the leases of a heartbeat are complete, or changes of what was taken in last."""
        host = self._by_id.get(told.node_id)
        base = told.base_generation
        return not base or (host is not None and host.generation == base)

    def apply_heartbeat(
        self, told: environments_pb2.HeartbeatRequest, *, now_s: float
    ) -> HostState:
        host = self._by_id.get(told.node_id)
        if host is None:
            host = self._by_id[told.node_id] = HostState(node_id=told.node_id)
            self._order.append(host)
        host.apply_heartbeat(told, now_s=now_s)
        self._update_snapshots(host, told.snapshots)
        self._update_images(host, (*told.images, *told.pulled_images))
        host.pulled_images = frozenset(told.pulled_images)
        return host

    def remove(self, host: HostState) -> None:
        """Remove a host that fell silent."""
        self._update_snapshots(host, ())
        self._update_images(host, ())
        del self._by_id[host.node_id]
        self._order.remove(host)

    def holders(self, run_id: str, snapshot_id: str) -> list[HostState]:
        """The hosts that hold a run's snapshot; a snapshot of another run is unknown."""
        return [
            self._by_id[name] for name in self._holders.get(SnapshotKey(run_id, snapshot_id), ())
        ]

    def image_holders(self, digest: str) -> list[HostState]:
        """The hosts that have an image of tasks, or pull it."""
        return [self._by_id[name] for name in self._image_holders.get(digest, ())]

    def template_of(self, run_id: str, snapshot_id: str) -> str | None:
        """The template that a run's snapshot was made from; None if no host holds it."""
        return next(iter(self._holders.get(SnapshotKey(run_id, snapshot_id), {}).values()), None)

    def has_snapshot(self, run_id: str, snapshot_id: str) -> bool:
        """True if a host holds a run's snapshot."""
        return self.template_of(run_id, snapshot_id) is not None

    def _update_images(self, host: HostState, told: Collection[str]) -> None:
        digests = frozenset(told)
        for gone in host.images - digests:
            del self._image_holders[gone][host.node_id]
            if not self._image_holders[gone]:
                del self._image_holders[gone]
        for digest in digests - host.images:
            self._image_holders.setdefault(digest, {})[host.node_id] = None
        host.images = digests

    def _update_snapshots(
        self, host: HostState, told: Collection[environments_pb2.HeldSnapshot]
    ) -> None:
        if not told and not host.snapshots:
            return
        templates = {SnapshotKey(each.run_id, each.snapshot_id): each.template for each in told}
        names = frozenset(templates)
        for gone in host.snapshots - names:
            del self._holders[gone][host.node_id]
            if not self._holders[gone]:
                del self._holders[gone]
        for name, template in templates.items():
            self._holders.setdefault(name, {})[host.node_id] = template
        host.snapshots = names


MOST_S = 300.0
"""Longest hold: a drain that is not renewed must not block a host's slots for ever."""


@dataclass(slots=True)
class HostDrains:
    """The hosts to drain, as named last, until the hold ends."""

    hosts: Hosts
    _names: frozenset[str] = frozenset()
    _until_s: float = -math.inf

    def start_drain(self, node_ids: Iterable[str], *, hold_s: float, now_s: float) -> list[str]:
        """Drain these hosts, and stop draining all others.

        Returns:
            Those that hold nothing, and so will hold nothing as long as they are named; unknown
            hosts hold nothing of this broker's runs.
        """
        self._names = frozenset(node_ids)
        self._until_s = now_s + min(hold_s, MOST_S)
        self.update(now_s=now_s)
        found = ((name, self.hosts.get(name)) for name in sorted(self._names))
        return [name for name, host in found if host is None or not host.num_held]

    def update(self, *, now_s: float) -> None:
        """Mark the hosts that drain now, and record since when each is empty."""
        if now_s >= self._until_s:
            self._names = frozenset()
        for host in self.hosts:
            self.update_host(host, now_s=now_s)

    def update_host(self, host: HostState, *, now_s: float) -> None:
        """Mark one host, which has just been heard."""
        host.is_draining = host.node_id in self._names
        if host.num_held:
            host.idle_since_s = None
        elif host.idle_since_s is None:
            host.idle_since_s = now_s
