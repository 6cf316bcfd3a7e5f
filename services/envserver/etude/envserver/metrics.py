"""Prometheus series of brokers and hosts."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 600)

environments = Gauge("etude_env_environments", "Leases that this host holds.", ["state"])
starts = Counter("etude_env_starts", "Environments opened, by how.", ["start"])
start_seconds = Histogram(
    "etude_env_start_seconds", "Time to open one environment.", ["start"], buckets=_SECONDS
)
start_cpu_seconds = Histogram(
    "etude_env_start_cpu_seconds",
    "CPU time of the VMM while one VM was started.",
    ["start"],
    buckets=_SECONDS,
)
warm_vms = Gauge("etude_env_stock", "Warm VMs, by how ready they are.", ["start"])
warm_start_failures = Counter("etude_env_stock_failures", "Warm VMs that could not be started.")
fork_failures = Counter(
    "etude_env_stem_failures", "VMs that could not be forked from a running one."
)
pause_seconds = Histogram(
    "etude_env_pause_seconds",
    "Time that a running VM was paused to be saved.",
    buckets=_SECONDS,
)
image_requests = Counter(
    "etude_env_image_requests", "Images that tasks name, by outcome on this host.", ["outcome"]
)
image_pull_seconds = Histogram(
    "etude_env_image_pull_seconds",
    "Time to pull and convert an image that tasks name.",
    buckets=_SECONDS,
)
image_bytes = Gauge("etude_env_image_bytes", "Disk space of the images that tasks name.")
read_grants = Counter(
    "etude_env_read_grants", "Objects that this broker let hosts without credentials read."
)
read_grant_refusals = Counter(
    "etude_env_read_grant_refusals",
    "Requests of hosts to read what neither the pool's spec nor an order names.",
)
snapshots = Gauge("etude_env_snapshots", "Snapshots that this host holds.")
snapshot_bytes = Gauge("etude_env_snapshot_bytes", "Disk space of the snapshots on this host.")
snapshot_seconds = Histogram(
    "etude_env_snapshot_seconds",
    "Time that an environment ran no turn while it was saved.",
    buckets=_SECONDS,
)
preemptions = Counter(
    "etude_env_preemptions",
    "Environments paused for leases of another class, and resumed.",
    ["step"],
)
suspensions = Counter("etude_env_rests", "VMs suspended and resumed between calls.", ["step"])
setup_seconds = Histogram(
    "etude_env_setup_seconds", "Time of the set-up of a task in an environment.", buckets=_SECONDS
)
tool_seconds = Histogram(
    "etude_env_tool_seconds", "Wall time of one tool call.", ["tool"], buckets=_SECONDS
)
grade_seconds = Histogram(
    "etude_env_grade_seconds", "Wall time of one verifier run.", buckets=_SECONDS
)
errors = Counter("etude_env_errors", "Failed calls, by kind.", ["kind"])
large_changes = Counter(
    "etude_env_changes_too_large", "Changes of workspaces that exceeded the limits."
)
cache_results = Counter(
    "etude_env_cache", "Repeatable commands, by whether their result was cached.", ["result"]
)
free_bytes = Gauge("etude_env_node_free_bytes", "Free space under this host's workspaces.")
queue_depth = Gauge("etude_env_queue_depth", "Environments that wait for a slot.")
acquire_seconds = Histogram(
    "etude_env_acquire_seconds", "Time from request to lease.", buckets=_SECONDS
)
leases = Gauge("etude_env_leases", "Leases granted and not ended.")
preempted = Gauge(
    "etude_env_preempted_leases", "Leases paused for those of another class: they take no slot."
)
reserved = Gauge(
    "etude_env_reserved_slots",
    "Slots kept free for classes below their floors, by their demand of the last minutes.",
)
granted = Counter("etude_env_granted", "Leases granted, by how the environment started.", ["start"])
opening = Gauge("etude_env_opening", "Environments that were ordered and have not started yet.")
planned = Gauge(
    "etude_env_planned", "Environments that plans expect at most within the next minute."
)
refusals = Counter("etude_env_refusals", "Launches rejected with a time to retry.")
plan_error_ratio = Gauge(
    "etude_env_plan_error_ratio",
    "Environments asked for over those that plans forecast, of the run where it is worst.",
)
nodes = Gauge("etude_env_nodes", "Hosts in rotation.")
egress_attempts = Counter(
    "etude_env_egress_attempts",
    "Connections out of environments, by verdict.",
    ["verdict"],
)
egress_bytes = Counter(
    "etude_env_egress_bytes", "Bytes carried for environments, by direction.", ["direction"]
)
egress_connections = Gauge(
    "etude_env_egress_connections", "Connections of environments that are open now."
)
