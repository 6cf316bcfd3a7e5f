"""Statistics of the newest grants and ended leases, from which the operator sizes a pool."""

import math
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from etude.common.pinned_images import pool_template
from etude.envserver import metrics
from etude.envserver.broker.classes.queues import ClassQueues
from etude.envserver.broker.hosts import Hosts
from etude.envserver.broker.lease_ledger import LeaseLedger
from etude.envserver.broker.warm_targets import WarmTargets
from etude.v1 import environments_pb2

NEWEST = 1_000
_GRANTED = {
    number: metrics.granted.labels(name.removeprefix("START_").lower())
    for name, number in environments_pb2.Start.items()
}
WARM = frozenset({environments_pb2.START_SHELL, environments_pb2.START_PAUSED_CLONE})


def _bounded_samples() -> deque[float]:
    return deque(maxlen=NEWEST)


@dataclass(slots=True)
class PoolStatistics:
    """Samples of the newest thousand of each kind."""

    acquire_ms: deque[float] = field(default_factory=_bounded_samples)
    """From request to lease."""
    start_ms: deque[float] = field(default_factory=_bounded_samples)
    """From order or first call to ready, as the host reports."""
    warm: deque[float] = field(default_factory=_bounded_samples)
    """1 for a start that found something ready, else 0."""
    first_ms: dict[str, deque[float]] = field(default_factory=dict)
    """The same of each host's first start of a template, by template."""
    lease_s: deque[float] = field(default_factory=_bounded_samples)
    """From grant to end."""

    def record_grant(self, lease: environments_pb2.Lease, *, waited_s: float) -> None:
        self.acquire_ms.append(1000 * waited_s)
        if lease.start != environments_pb2.START_UNSPECIFIED:
            self.record_start(lease.start, lease.start_ms)

    def record_first_start(self, template: str, start_ms: int) -> None:
        """Record a host's first start of a template."""
        self.first_ms.setdefault(template, _bounded_samples()).append(float(start_ms))

    def record_start(self, start: environments_pb2.Start, start_ms: int) -> None:
        self.start_ms.append(float(start_ms))
        self.warm.append(float(start in WARM))

    @property
    def warm_percent(self) -> int:
        """Share of starts that found something ready."""
        return round(100 * sum(self.warm) / len(self.warm)) if self.warm else 0


def record_granted(start: environments_pb2.Start, *, waited_s: float) -> None:
    """Count a granted environment by the way it came to be."""
    metrics.acquire_seconds.observe(waited_s)
    _GRANTED.get(start, _GRANTED[environments_pb2.START_UNSPECIFIED]).inc()


def record_pool(queue: ClassQueues, ledger: LeaseLedger, *, now_s: float) -> None:
    """Set the gauges of a broker."""
    metrics.queue_depth.set(len(queue))
    metrics.reserved.set(queue.num_reserved(now_s=now_s))
    metrics.leases.set(len(ledger.leases))
    metrics.preempted.set(ledger.slots.num_preempted)
    metrics.nodes.set(len(ledger.hosts))
    metrics.opening.set(ledger.hosts.opening)


def quantile(values: Iterable[float], share: float) -> int:
    """Quantile by nearest rank; 0 without samples."""
    ordered = sorted(values)
    return round(ordered[math.ceil(share * len(ordered)) - 1]) if ordered else 0


@dataclass(slots=True)
class StartRecords:
    """Tells statistics and warm targets of each start."""

    hosts: Hosts
    statistics: PoolStatistics
    warm_targets: WarmTargets

    def record_beginning(
        self, node_id: str, beginning: environments_pb2.Beginning, templates: Collection[str]
    ) -> None:
        """Record the start of an environment whose lease was granted earlier.

        Args:
            node_id: of its host.
            beginning: as the host reported it.
            templates: of the pool.
        """
        if pool_template(beginning.template) in templates:
            self.statistics.record_start(beginning.start, beginning.start_ms)
        # What is kept ready of a template would not have helped one of a task's image.
        if beginning.template in templates:
            self.record(node_id, beginning.template, beginning.start, beginning.start_ms)

    def record(
        self, node_id: str, template: str, start: environments_pb2.Start, start_ms: int
    ) -> None:
        """Record a start of one of the pool's templates."""
        host = self.hosts.get(node_id)
        is_told = start != environments_pb2.START_UNSPECIFIED
        if is_told and host is not None and template not in host.started_templates:
            host.started_templates.add(template)
            self.statistics.record_first_start(template, start_ms)
        self.warm_targets.record_start(template, start, len(self.hosts), now_s=time.monotonic())
