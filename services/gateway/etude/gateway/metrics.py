"""Prometheus metrics of the gateway."""

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter(
    "etude_gateway_requests_total",
    "Requests, by the arm that served them (empty before one is chosen) and by HTTP status: of"
    " the failure of a stream, 499 where the client went away.",
    ("arm", "code"),
)
REQUEST_SECONDS = Histogram(
    "etude_gateway_request_seconds",
    "Time of a request to the end of its response, by arm.",
    ("arm",),
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
FIRST_TEXT_SECONDS = Histogram(
    "etude_gateway_first_text_seconds",
    "Time of a streamed request to its first text, by arm.",
    ("arm",),
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
TURNS = Counter(
    "etude_gateway_turns_total",
    "Turns by their place: they continue a branch, split one off, or start one because the"
    " conversation is new, repeats no known turn (break), or the template cannot continue it.",
    ("place",),
)
ABANDONED_TURNS = Counter(
    "etude_gateway_abandoned_turns_total",
    "Turns that ended before they were whole, by arm: the client stopped them, or they failed. They"
    " have no record.",
    ("arm",),
)
INTERRUPTED_CALLS = Counter(
    "etude_gateway_interrupted_calls_total",
    "Calls to engines that ended early; their turns went on elsewhere.",
)
SUBSTITUTED_CALLS = Counter(
    "etude_gateway_substituted_calls_total",
    "Calls for users of the canary that engines of the stable channel took, as no other sampled.",
)
RECORDED_TURNS = Counter(
    "etude_gateway_recorded_turns_total",
    "Turns by what became of their record: durable, without consent, without a key"
    " of the feedback service, or dropped as too many wait.",
    ("result",),
)
WITHHELD_TURNS = Counter(
    "etude_gateway_withheld_turns_total",
    "Turns that were recorded without their tokens, by the rule of redaction that found something"
    " in them or earlier in their branch.",
    ("rule",),
)
WAITING_RECORD_BYTES = Gauge(
    "etude_gateway_waiting_record_bytes",
    "Records of turns that are not durable yet.",
)
LENT_ENGINES = Gauge(
    "etude_gateway_lent_engines",
    "Engines of the stable channel that sample rollouts of the run, as this process sees them.",
)
NEEDED_ENGINES = Gauge(
    "etude_gateway_needed_engines",
    "Engines of the stable channel that users need, by their turns of the last minutes.",
)
CANARY_RECORD = Gauge(
    "etude_gateway_canary_record",
    "Number of the newest record of the canary channel.",
)
CANARY_SHARE = Gauge(
    "etude_gateway_canary_share",
    "Users who are served by the canary channel, in 10,000ths of all.",
)
