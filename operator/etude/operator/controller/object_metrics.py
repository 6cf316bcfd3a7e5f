"""Metrics of single runs and pools; their series are removed with the objects."""

from dataclasses import dataclass, field

from etude.common.api.kinds import EnvPool, RLRun
from etude.common.api.pool.status import Slots
from etude.operator import metrics, names
from etude.operator.actions import Moment
from etude.operator.conditions import troubles
from etude.operator.manifests import Manifest, Ref, labels, ref

LONGEST_S = 30.0
"""Longest gap between two passes that is counted; in a longer one another operator acted."""


def applied(manifest: Manifest) -> None:
    """Count a created pool host; hosts are never changed, so each apply creates one."""
    found = labels(manifest)
    is_node = manifest["kind"] in {"Pod", "Sandbox"} and found.get(names.ROLE) == names.NODE
    if is_node:
        metrics.POOL_CREATES.labels(ref(manifest).namespace, found[names.POOL]).inc()


def _forget(key: Ref) -> None:
    about = (key.namespace, key.name)
    if key.kind == "RLRun":
        for gauge in (metrics.RUN_STEP, metrics.RUN_ETTR, metrics.RUN_STALENESS):
            gauge.remove(*about)
        metrics.RUN_PODS.remove_by_labels({"namespace": key.namespace, "run": key.name})
    if key.kind == "EnvPool":
        for state in Slots.model_fields:
            metrics.POOL_SLOTS.remove(*about, state)
        for share in ("0.5", "0.99"):
            metrics.POOL_WAIT.remove(*about, share)
        for series in (
            metrics.POOL_DESIRED,
            metrics.POOL_WARM,
            metrics.POOL_CREATES,
            metrics.POOL_IDLE,
        ):
            series.remove(*about)


@dataclass(slots=True)
class Measures:
    """Exports the metrics of runs and pools, and remembers what their counters build on."""

    _idle_since: dict[Ref, float] = field(default_factory=dict)
    """Monotonic time at which each pool's idle slots were counted last."""

    _troubles: dict[Ref, set[tuple[str, str]]] = field(default_factory=dict)
    """Exported conditions and reasons of each object."""

    def run(self, found: RLRun) -> None:
        """Export the metrics of a run."""
        about = (found.metadata.namespace, found.metadata.name)
        status = found.status
        self._tell(Ref("RLRun", *about), troubles(status.conditions))
        if status.step is not None:
            metrics.RUN_STEP.labels(*about).set(status.step.current)
        if status.ettr is not None:
            metrics.RUN_ETTR.labels(*about).set(float(status.ettr))
        if status.staleness is not None:
            metrics.RUN_STALENESS.labels(*about).set(status.staleness.max)
        for role in status.roles:
            metrics.RUN_PODS.labels(*about, role.name, "desired").set(role.desired)
            metrics.RUN_PODS.labels(*about, role.name, "ready").set(role.ready)

    def pool(self, found: EnvPool, now: Moment) -> None:
        """Export the metrics of a pool."""
        about = (found.metadata.namespace, found.metadata.name)
        status = found.status
        self._tell(Ref("EnvPool", *about), troubles(status.conditions))
        metrics.POOL_DESIRED.labels(*about).set(status.desired)
        if status.leases is not None:
            for share, wait_ms in (
                ("0.5", status.leases.acquire_p50_ms),
                ("0.99", status.leases.acquire_p99_ms),
            ):
                metrics.POOL_WAIT.labels(*about, share).set(wait_ms / 1000)
            metrics.POOL_WARM.labels(*about).set(status.leases.warm_hit_percent / 100)
        if status.slots is None:
            return
        for state, count in status.slots.model_dump().items():
            metrics.POOL_SLOTS.labels(*about, state).set(count)
        key = Ref("EnvPool", *about)
        elapsed_s = now.monotonic_s - self._idle_since.get(key, now.monotonic_s)
        self._idle_since[key] = now.monotonic_s
        if 0 < elapsed_s <= LONGEST_S:
            metrics.POOL_IDLE.labels(*about).inc(elapsed_s * status.slots.idle)

    def forget(self, key: Ref) -> None:
        """Remove the series of a deleted object."""
        self._idle_since.pop(key, None)
        self._tell(key, set())
        self._troubles.pop(key, None)
        _forget(key)

    def _tell(self, key: Ref, found: set[tuple[str, str]]) -> None:
        about = (key.namespace, key.kind, key.name)
        for trouble in self._troubles.get(key, set()) - found:
            metrics.CONDITION_UNHEALTHY.remove(*about, *trouble)
        for trouble in found:
            metrics.CONDITION_UNHEALTHY.labels(*about, *trouble).set(1)
        self._troubles[key] = found
