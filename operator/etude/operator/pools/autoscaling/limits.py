"""Limits of scaling: hard cap by recent demand, and the token bucket of creations."""

import math

from etude.operator.pools.autoscaling.config import TICK_S, PoolConfig, Refill
from etude.operator.pools.autoscaling.values import Bucket, PoolMetrics
from etude.operator.pools.autoscaling.windows import Samples, highest

GOING_S = 60.0
"""Time that a replica may take to terminate."""


def memory_s(config: PoolConfig) -> float:
    """Seconds for which the hard cap remembers demand.

    Longer than the delay after which a pool shrinks: else it would shrink, and find in the same
    moment that it has more replicas than demand explains.
    """
    scaling = config.autoscaling
    return max(scaling.stable_window_s, scaling.scale_down_delay_s) + GOING_S + TICK_S


def hard_cap(peaks: Samples, config: PoolConfig, *, now_s: float) -> int:
    """Most replicas that recent demand explains.

    Args:
        peaks: desired replicas, with spares, which are limited themselves: else more failures would
            explain more replicas.
        config: of the pool.
        now_s: on the clock of the samples.
    """
    return overcommitted(highest(peaks, memory_s(config), now_s=now_s), config)


def overcommitted(wanted: float, config: PoolConfig) -> int:
    """Desired replicas times the overcommit factor."""
    return math.ceil(config.overcommit_factor * wanted)


def is_exceeded(metrics: PoolMetrics, cap: int) -> bool:
    """There are more replicas than the cap, terminating ones included."""
    return metrics.ready + metrics.creating + metrics.terminating > cap


def refilled(bucket: Bucket, refill: Refill, *, now_s: float) -> Bucket:
    """The token bucket now; it never holds more than one tick adds."""
    most = max(1.0, refill.max_per_second * TICK_S)
    passed_s = max(0.0, now_s - bucket.at_s)
    return Bucket(min(most, bucket.tokens + refill.max_per_second * passed_s), now_s)


def creates(missing: int, bucket: Bucket, refill: Refill, *, creating: int) -> int:
    """Missing replicas that may be created now."""
    room = refill.max_in_flight - creating
    return max(0, min(missing, math.floor(bucket.tokens), room))


def less(bucket: Bucket, number: int) -> Bucket:
    """The token bucket without the tokens of created replicas."""
    return bucket._replace(tokens=bucket.tokens - number)
