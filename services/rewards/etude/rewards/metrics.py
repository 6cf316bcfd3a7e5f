"""Prometheus metrics of the reward service."""

from prometheus_client import Counter, Gauge, Histogram

REWARD_SECONDS = Histogram(
    "etude_reward_seconds",
    "Time to score one group.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
REWARD_FAULTS = Counter(
    "etude_reward_faults_total",
    "Rollouts that could not be scored, by reason and by who caused it.",
    ("kind", "blame"),
)
REWARD_PART = Gauge(
    "etude_reward_part",
    "Mean value of each function over the last group, before its weight; penalties are negative.",
    ("name",),
)
