"""Scheduled size of a pool."""

from collections.abc import Iterable

from etude.common.api.pool import cron
from etude.operator.pools.autoscaling.config import ScheduleEntry


def scheduled_idle(schedule: Iterable[ScheduleEntry], *, wall_s: float) -> int:
    """Slots of the entry whose moment came last; of several at one moment, the most.

    Args:
        schedule: entries that cron.problem() finds nothing wrong with.
        wall_s: seconds since 1970.
    """
    minute = int(wall_s // cron.MINUTE_S)
    fired = [(cron.last(each.cron, each.time_zone, minute), each.min_idle) for each in schedule]
    return max(fired, default=(0.0, 0))[1]
