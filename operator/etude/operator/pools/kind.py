"""The kind EnvPool."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.status import EnvPoolStatus, Slots
from etude.common.api.schema import crd
from etude.operator import metrics, names
from etude.operator.actions import ClockReading, Decision
from etude.operator.builders.addresses import broker_addresses
from etude.operator.builders.platform import Platform, has_own_nodes
from etude.operator.builders.pool import pool_children
from etude.operator.kind import KindContext, KindReconciler, PassInput, ResourceKind
from etude.operator.manifests import Manifest, Ref, labels, ref
from etude.operator.metrics import ConditionMetric
from etude.operator.pools import decide, observe
from etude.operator.pools.size import PoolSize, PoolSizers
from etude.operator.remotes.followers import ReportSource

MAX_GAP_S = 30.0
"""Longest gap between two passes that counts; in a longer one another operator acted."""
WAIT_QUANTILES = ("0.5", "0.99")


@dataclass(slots=True)
class PoolGauges:
    """Metrics of single pools."""

    _conditions: ConditionMetric = field(default_factory=ConditionMetric)
    _idle_since: dict[Ref, float] = field(default_factory=dict)
    """Monotonic time at which each pool's idle slots were counted last."""

    def export(self, pool: EnvPool, now: ClockReading) -> None:
        about = (pool.metadata.namespace, pool.metadata.name)
        key, status = Ref("EnvPool", *about), pool.status
        self._conditions.export(key, status.conditions)
        metrics.POOL_DESIRED.labels(*about).set(status.desired)
        if status.leases is not None:
            waits_ms = (status.leases.acquire_p50_ms, status.leases.acquire_p99_ms)
            for quantile, wait_ms in zip(WAIT_QUANTILES, waits_ms, strict=True):
                metrics.POOL_WAIT.labels(*about, quantile).set(wait_ms / 1000)
            metrics.POOL_WARM.labels(*about).set(status.leases.warm_hit_percent / 100)
        if status.slots is None:
            return
        for state, count in status.slots.model_dump().items():
            metrics.POOL_SLOTS.labels(*about, state).set(count)
        elapsed_s = now.monotonic_s - self._idle_since.get(key, now.monotonic_s)
        self._idle_since[key] = now.monotonic_s
        if 0 < elapsed_s <= MAX_GAP_S:
            metrics.POOL_IDLE.labels(*about).inc(elapsed_s * status.slots.idle)

    def remove(self, key: Ref) -> None:
        self._idle_since.pop(key, None)
        self._conditions.remove(key)
        about = (key.namespace, key.name)
        for state in Slots.model_fields:
            metrics.POOL_SLOTS.remove(*about, state)
        for quantile in WAIT_QUANTILES:
            metrics.POOL_WAIT.remove(*about, quantile)
        for series in (
            metrics.POOL_DESIRED,
            metrics.POOL_WARM,
            metrics.POOL_CREATES,
            metrics.POOL_IDLE,
        ):
            series.remove(*about)


@dataclass(slots=True)
class PoolReconciler(KindReconciler[EnvPool, EnvPoolStatus]):
    """Observes pools, follows their brokers, sizes and decides."""

    context: KindContext
    sizers: PoolSizers = field(default_factory=PoolSizers)
    _gauges: PoolGauges = field(default_factory=PoolGauges)

    @override
    def decide(
        self, resource: EnvPool, manifest: Manifest, inputs: PassInput
    ) -> Decision[EnvPoolStatus]:
        pool, context = resource, self.context
        observed = observe.observe_pool(
            context.cluster,
            context.reports,
            pool,
            inputs.problem,
            has_own_nodes=has_own_nodes(inputs.platform, pool),
        )
        self._follow(pool, manifest, observed.brokers)
        size = None
        if observed.has_own_nodes:
            size = PoolSize(desired=len(observed.hosts), limit=0)
        elif pool.status.resolved is not None:
            size = self.sizers.get(pool).decide_size(pool, observed, inputs.now)
        self._gauges.export(pool, inputs.now)
        return decide.decide(pool, observed, inputs.now, inputs.platform, size)

    @override
    def record_apply(self, manifest: Manifest) -> None:
        """Count a created host; hosts are never changed, so each apply creates one."""
        found = labels(manifest)
        if manifest["kind"] in {"Pod", "Sandbox"} and found.get(names.ROLE) == names.HOST:
            metrics.POOL_CREATES.labels(ref(manifest).namespace, found[names.POOL]).inc()

    @override
    def forget(self, key: Ref, uid: str) -> None:
        self.sizers.forget(uid)
        self._gauges.remove(key)

    def _follow(self, pool: EnvPool, manifest: Manifest, pods: Sequence[Manifest]) -> None:
        for number, target in enumerate(broker_addresses(pool.metadata.name, pool.spec.brokers)):
            self.context.followers.follow_ready_pod(
                ref(manifest),
                ReportSource(pool.metadata.uid, number),
                target,
                [pod for pod in pods if names.ordinal(pod["metadata"]["name"]) == number],
            )


def _children(pool: EnvPool, platform: Platform) -> list[Manifest]:
    # The number of hosts of an autoscaled pool is unknown: one host is rendered.
    count = 0 if has_own_nodes(platform, pool) else pool.spec.asked_replicas
    ordinals = tuple(range(count))
    return pool_children(pool, ordinals, platform.images, platform)


ENV_POOL = ResourceKind(
    definition=crd.ENV_POOL,
    model=EnvPool,
    status=EnvPoolStatus,
    reconciler=PoolReconciler,
    children=_children,
    owner_of=lambda child: labels(child).get(names.POOL),
)
