"""Prometheus metrics of the feedback service."""

from prometheus_client import Counter, Gauge, Histogram

EVENTS = Counter(
    "etude_feedback_events_total",
    "Feedback events, by kind and by the result that their sender was told.",
    ("kind", "result"),
)
REDACTIONS = Counter(
    "etude_feedback_redactions_total",
    "Secrets and personal data that were replaced before an event was stored.",
)
ERASURES = Counter(
    "etude_feedback_erasures_total",
    "Users whose events were made unreadable.",
)
UNREADABLE = Counter(
    "etude_feedback_unreadable_events_total",
    "Times that a damaged event was left out: by each page and feed, and again after a restart.",
)
ACKNOWLEDGE_SECONDS = Histogram(
    "etude_feedback_acknowledge_seconds",
    "Time from a request with events to their acknowledgement.",
    buckets=(0.01, 0.03, 0.1, 0.2, 0.3, 1, 3, 10, 30),
)
PENDING = Gauge(
    "etude_feedback_pending_records",
    "Records of the ledger that are not durable yet.",
)
WAITING_ROLLOUTS = Gauge(
    "etude_feedback_waiting_rollouts",
    "Served rollouts that are in no window yet.",
)
WINDOWS = Counter(
    "etude_feedback_closed_windows_total",
    "Windows that were closed.",
)
WINDOW_ROLLOUTS = Counter(
    "etude_feedback_window_rollouts_total",
    "Rollouts of closed windows: trained, or the reason why not.",
    ("result",),
)
LATE_EVENTS = Counter(
    "etude_feedback_late_events_total",
    "Events that came after the window of their rollout was closed, by kind; they train nothing.",
    ("kind",),
)
REMOVED_TURN_OBJECTS = Counter(
    "etude_feedback_removed_turn_objects_total",
    "Objects of recorded turns and of windows' rollouts that were removed because of their age.",
)
DECISIONS = Counter(
    "etude_feedback_release_decisions_total",
    "Decisions about releases, by action.",
    ("action",),
)
CANARY_SHARE = Gauge(
    "etude_feedback_canary_share_ratio",
    "Share of all users with the candidate; 0 while none is tested.",
)
RELEASE_WAITS = Gauge(
    "etude_feedback_release_waits",
    "1 while a person has to promote the candidate or roll it back.",
)
RELEASE_FROZEN = Gauge(
    "etude_feedback_release_frozen",
    "1 while only roll-backs are made.",
)
