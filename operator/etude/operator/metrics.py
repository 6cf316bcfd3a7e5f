"""What the operator counts, by the names that its /metrics shows."""

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter("etude_reconcile", "Passes over one object.", ["kind", "result"])
RECONCILE_SECONDS = Histogram(
    "etude_reconcile_duration_seconds",
    "Time of one pass, API calls included.",
    ["kind"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 30),
)
QUEUE_DEPTH = Gauge("etude_workqueue_depth", "Keys in line.")
QUEUE_ADDS = Counter("etude_workqueue_adds", "Keys added, repeats included.")
QUEUE_RETRIES = Counter("etude_workqueue_retries", "Keys put back after a pass that failed.")
QUEUE_WAIT_SECONDS = Histogram(
    "etude_workqueue_wait_seconds",
    "Time of a key in line, from when it was due to when a worker took it.",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
)
LEADER = Gauge("etude_leader", "1 while this replica acts.")
API_REQUESTS = Counter(
    "etude_api_requests",
    "Requests to the API server; the code of one without an answer is none.",
    ["verb", "resource", "code"],
)
API_SECONDS = Histogram(
    "etude_api_request_duration_seconds",
    "Time of one request to the API server.",
    ["verb"],
    buckets=(0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
)
API_WAITED = Counter(
    "etude_api_wait_seconds", "Time in which requests waited for the operator's own rate limit."
)
WATCH_LAST_EVENT = Gauge(
    "etude_watch_last_event_timestamp_seconds", "When a watch last brought something.", ["kind"]
)
WATCH_GAPS = Counter(
    "etude_watch_gap", "Objects that a watch had missed, found by listing.", ["kind"]
)
EVENTS_DROPPED = Counter(
    "etude_events_dropped", "Kubernetes Events that were not published: too many of one object."
)
STARTUP_SECONDS = Histogram(
    "etude_startup_seconds",
    "Time of a pod's start by role and stage: until it is scheduled, its containers have started, "
    "it is ready.",
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
TROUBLE = Gauge(
    "etude_trouble",
    "1 while a condition of a run or pool says that something is wrong.",
    ["namespace", "kind", "name", "condition", "reason"],
)
POOL_SLOTS = Gauge("etude_pool_slots", "Environments by state.", ["namespace", "pool", "state"])
POOL_DESIRED = Gauge("etude_pool_desired", "Nodes that there should be.", ["namespace", "pool"])
POOL_CREATES = Counter(
    "etude_pool_creates", "Nodes created, replacements included.", ["namespace", "pool"]
)
POOL_WAIT = Gauge(
    "etude_pool_lease_wait_seconds",
    "How long the newest leases were waited for.",
    ["namespace", "pool", "quantile"],
)
POOL_WARM = Gauge(
    "etude_pool_warm_hit_ratio",
    "Share of the newest starts that found something ready.",
    ["namespace", "pool"],
)
POOL_IDLE = Counter(
    "etude_pool_idle_slot_seconds", "Slots of ready nodes that nobody held.", ["namespace", "pool"]
)
CERTIFICATES = Counter(
    "etude_issuer_requests", "Requests to the issuer: issued, refused or failed.", ["result"]
)
CA_EXPIRY = Gauge(
    "etude_issuer_ca_expiry_timestamp_seconds", "When the issuer's last CA ends, in Unix time."
)
