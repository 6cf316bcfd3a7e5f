"""Prometheus series of the inference role; the engine's own are in the same registry."""

from prometheus_client import Counter, Gauge, Histogram

_FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SLOW = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

WEIGHTS_STAGE_SECONDS = Histogram(
    "etude_weights_stage_seconds", "Fetch and verify one version", buckets=_SLOW
)
WEIGHTS_COMMIT_SECONDS = Histogram(
    "etude_weights_commit_seconds", "Pause, overwrite and resume", buckets=_FAST
)
WEIGHTS_PAUSE_SECONDS = Histogram(
    "etude_weights_pause_seconds", "Running requests were frozen", buckets=_FAST
)
WEIGHTS_BYTES = Counter(
    "etude_weights_bytes_total", "Payload bytes fetched and verified", ["kind", "codec"]
)
WEIGHTS_CORRUPT = Counter("etude_weights_corrupt_total", "Versions refused for their content")
WEIGHTS_UNDO = Counter(
    "etude_weights_undo_total", "Swaps that failed half-way and were taken back on all ranks"
)
WEIGHTS_UNDO_BYTES = Gauge(
    "etude_weights_undo_bytes", "Memory of all ranks for taking back versions"
)
WEIGHTS_RESEED = Counter(
    "etude_weights_reseed_total", "Complete versions loaded in place of deltas", ["reason"]
)
WEIGHTS_AUDIT = Counter(
    "etude_weights_audit_total", "Full scans of live weights against their digest", ["result"]
)
WEIGHTS_LAG = Gauge(
    "etude_weights_lag_versions", "Newest accepted number minus the live one", ["replica"]
)
LENDING_LENT = Gauge(
    "etude_lending_lent",
    "1 while the engine of a channel samples rollouts, at the run's newest version",
)
LENDING_RETURN_SECONDS = Histogram(
    "etude_lending_return_seconds",
    "Time from the end of a loan until the version of the channel is live again",
    buckets=_FAST,
)
CHANNEL_RECORD = Gauge(
    "etude_channel_record",
    "Number of the newest record of the channel that is followed",
    ["channel"],
)
CHANNEL_FOLLOWED = Gauge(
    "etude_channel_followed",
    "1 while the version of the channel's newest record is live, or the record serves nothing",
    ["channel"],
)
SPECULATION_ON = Gauge(
    "etude_speculation_on", "1 while the head of multi-token prediction guesses tokens"
)
SPECULATION_SPEEDUP = Gauge(
    "etude_speculation_speedup",
    "Tokens a second with guesses over those without, in the last trial of the guard",
)
SPECULATION_ACCEPTANCE = Gauge(
    "etude_speculation_acceptance",
    "Share of guessed tokens that were accepted, in the last trial of the guard; 0 before one.",
)
