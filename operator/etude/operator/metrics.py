"""Prometheus metrics of the operator."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge, Histogram

from etude.common.api.meta import Condition
from etude.operator.conditions import unhealthy_conditions
from etude.operator.manifests import Ref

RECONCILES = Counter("etude_reconcile", "Passes over one object.", ["kind", "result"])
RECONCILE_SECONDS = Histogram(
    "etude_reconcile_duration_seconds",
    "Time of one pass, API calls included.",
    ["kind"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 30),
)
QUEUE_DEPTH = Gauge("etude_workqueue_depth", "Keys in the queue.")
QUEUE_ADDS = Counter("etude_workqueue_adds", "Keys added, repeats included.")
QUEUE_RETRIES = Counter("etude_workqueue_retries", "Keys queued again after a failed pass.")
QUEUE_WAIT_SECONDS = Histogram(
    "etude_workqueue_wait_seconds",
    "Time of a key in the queue, from its due time until a worker takes it.",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
)
LEADER = Gauge("etude_leader", "1 while this replica acts.")
API_REQUESTS = Counter(
    "etude_api_requests",
    "Requests to the API server; code none is a request without an answer.",
    ["verb", "resource", "code"],
)
API_SECONDS = Histogram(
    "etude_api_request_duration_seconds",
    "Time of one request to the API server.",
    ["verb"],
    buckets=(0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
)
API_WAITED = Counter(
    "etude_api_wait_seconds", "Time that requests waited for the operator's own rate limit."
)
WATCH_LAST_EVENT = Gauge(
    "etude_watch_last_event_timestamp_seconds", "Time of the last event of a watch.", ["kind"]
)
WATCH_GAPS = Counter(
    "etude_watch_gap", "Changes that a watch had missed, found by listing.", ["kind"]
)
EVENTS_DROPPED = Counter(
    "etude_events_dropped", "Kubernetes Events not published, because one object had too many."
)
STARTUP_SECONDS = Histogram(
    "etude_startup_seconds",
    "Startup time of a pod by role and stage: scheduled, started, ready.",
    ["role", "stage"],
    buckets=(1, 2, 5, 10, 30, 60, 120, 300, 600, 1800),
)
RUN_STEP = Gauge("etude_run_step", "Finished steps of the active phase.", ["namespace", "run"])
RUN_ETTR = Gauge(
    "etude_run_effective_training_time_ratio",
    "Seconds of kept steps as a share of the time with pods.",
    ["namespace", "run"],
)
RUN_STALENESS = Gauge(
    "etude_run_staleness", "Largest staleness of the last step.", ["namespace", "run"]
)
RUN_PODS = Gauge(
    "etude_run_pods",
    "Pods of each role by state: desired or ready.",
    ["namespace", "run", "role", "state"],
)
CONDITION_UNHEALTHY = Gauge(
    "etude_condition_unhealthy",
    "1 while a condition of a run or pool is unhealthy.",
    ["namespace", "kind", "name", "condition", "reason"],
)
POOL_SLOTS = Gauge("etude_pool_slots", "Environments by state.", ["namespace", "pool", "state"])
POOL_DESIRED = Gauge("etude_pool_desired", "Desired hosts of a pool.", ["namespace", "pool"])
POOL_CREATES = Counter(
    "etude_pool_creates", "Hosts created, replacements included.", ["namespace", "pool"]
)
POOL_WAIT = Gauge(
    "etude_pool_lease_wait_seconds",
    "Wait for the newest leases.",
    ["namespace", "pool", "quantile"],
)
POOL_WARM = Gauge(
    "etude_pool_warm_hit_ratio",
    "Share of the newest starts that the warm pool served.",
    ["namespace", "pool"],
)
POOL_IDLE = Counter(
    "etude_pool_idle_slot_seconds", "Free slots of ready hosts over time.", ["namespace", "pool"]
)
CERTIFICATES = Counter(
    "etude_issuer_requests", "Requests to the issuer: issued, refused or failed.", ["result"]
)
CA_EXPIRY = Gauge(
    "etude_issuer_ca_expiry_timestamp_seconds", "Expiry of the issuer's last CA, in Unix time."
)


@dataclass(slots=True)
class ConditionMetric:
    """Exports the unhealthy conditions of objects, and removes those that have recovered."""

    _exported: dict[Ref, set[tuple[str, str]]] = field(default_factory=dict)
    """Conditions and their reasons, by object."""

    def export(self, key: Ref, conditions: Iterable[Condition]) -> None:
        self._replace(key, unhealthy_conditions(conditions))

    def remove(self, key: Ref) -> None:
        self._replace(key, set())
        self._exported.pop(key, None)

    def _replace(self, key: Ref, unhealthy: set[tuple[str, str]]) -> None:
        about = (key.namespace, key.kind, key.name)
        for condition in self._exported.get(key, set()) - unhealthy:
            CONDITION_UNHEALTHY.remove(*about, *condition)
        for condition in unhealthy:
            CONDITION_UNHEALTHY.labels(*about, *condition).set(1)
        self._exported[key] = unhealthy
