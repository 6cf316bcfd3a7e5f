"""Limits of scaling: hard cap, token bucket of creations, schedule, and scale-down victims."""

import math
from collections.abc import Iterable, Sequence

from etude.common.api.pool import cron
from etude.common.api.pool.autoscaling import Refill, ScheduleEntry
from etude.operator.pools.autoscaling.config import TICK_S, PoolScalingConfig
from etude.operator.pools.autoscaling.values import CreationBucket, IdleReplica, PoolMetrics
from etude.operator.pools.autoscaling.windows import Samples, highest

TERMINATION_S = 60.0
"""Time that a replica may take to terminate."""


def cap_memory_s(config: PoolScalingConfig) -> float:
    """Seconds for which the hard cap remembers demand.

    Longer than the delay after which a pool shrinks: else it would shrink, and find in the same
    moment that it has more replicas than demand explains.
    """
    scaling = config.autoscaling
    return max(scaling.stable_window_s, scaling.scale_down_delay_s) + TERMINATION_S + TICK_S


def hard_cap(peaks: Samples, config: PoolScalingConfig, *, now_s: float) -> int:
    """Most replicas that recent demand explains.

    Args:
        peaks: desired replicas, with spares, which are limited themselves: else more failures would
            explain more replicas.
        config: of the pool.
        now_s: on the clock of the samples.
    """
    return overcommit(highest(peaks, cap_memory_s(config), now_s=now_s), config)


def overcommit(wanted: float, config: PoolScalingConfig) -> int:
    """Desired replicas times the overcommit factor."""
    return math.ceil(config.overcommit_factor * wanted)


def is_exceeded(metrics: PoolMetrics, cap: int) -> bool:
    """There are more replicas than the cap, terminating ones included."""
    return metrics.ready + metrics.creating + metrics.terminating > cap


def refill_tokens(bucket: CreationBucket, refill: Refill, *, now_s: float) -> CreationBucket:
    """The token bucket now; it never holds more than one tick adds."""
    most = max(1.0, refill.max_per_second * TICK_S)
    passed_s = max(0.0, now_s - bucket.at_s)
    return CreationBucket(min(most, bucket.tokens + refill.max_per_second * passed_s), now_s)


def num_creates(missing: int, bucket: CreationBucket, refill: Refill, *, creating: int) -> int:
    """Missing replicas that may be created now."""
    room = refill.max_in_flight - creating
    return max(0, min(missing, math.floor(bucket.tokens), room))


def take_tokens(bucket: CreationBucket, number: int) -> CreationBucket:
    """The token bucket without the tokens of created replicas."""
    return bucket._replace(tokens=bucket.tokens - number)


def scheduled_idle(schedule: Iterable[ScheduleEntry], *, wall_s: float) -> int:
    """Slots of the entry whose moment came last; of several at one moment, the most.

    Args:
        schedule: entries that cron.problem() finds nothing wrong with.
        wall_s: seconds since 1970.
    """
    minute = int(wall_s // cron.MINUTE_S)
    fired = [
        (cron.last_occurrence(each.cron, each.time_zone, minute), each.min_idle)
        for each in schedule
    ]
    return max(fired, default=(0.0, 0))[1]


def victims(idle: Sequence[IdleReplica], excess: int) -> tuple[str, ...]:
    """Names of at most `excess` idle replicas, the least useful first.

    The order: on draining nodes, without cached images, idle for longest; the name makes it
    deterministic.
    """
    if excess <= 0:
        return ()
    order = sorted(idle, key=lambda r: (not r.is_draining, r.is_cached, r.since_s, r.name))
    return tuple(replica.name for replica in order[:excess])
