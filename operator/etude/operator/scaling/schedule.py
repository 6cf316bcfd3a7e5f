"""How many slots a pool's schedule keeps idle now."""

import functools
from collections.abc import Iterable
from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import CroniterError, croniter

from etude.operator.scaling.config import ScheduleEntry

MINUTE_S = 60
_ANY_MINUTE = 30_000_000


def scheduled_idle(schedule: Iterable[ScheduleEntry], *, wall_s: float) -> int:
    """Slots of the entry whose moment came last; of several at one moment, the most.

    Args:
        schedule: entries that problem() finds nothing wrong with.
        wall_s: seconds since 1970.
    """
    minute = int(wall_s // MINUTE_S)
    fired = [(_last(entry.cron, entry.time_zone, minute), entry.min_idle) for entry in schedule]
    return max(fired, default=(0.0, 0))[1]


def problem(entry: ScheduleEntry) -> str | None:
    """What is wrong with an entry, with how to put it right; None when nothing is."""
    if len(entry.cron.split()) != 5 or not croniter.is_valid(entry.cron):
        return f'cron "{entry.cron}" is no five cron fields such as "0 8 * * 1-5"'
    try:
        ZoneInfo(entry.time_zone)
        _last(entry.cron, entry.time_zone, _ANY_MINUTE)
    except CroniterError:
        return f'cron "{entry.cron}" names a moment that never comes'
    except (ZoneInfoNotFoundError, ValueError):
        return f'timeZone "{entry.time_zone}" is unknown: name one such as "Europe/Berlin"'
    return None


# Pools share few expressions, and a look back costs a quarter of a millisecond.
@functools.lru_cache(maxsize=1024)
def _last(cron: str, time_zone: str, minute: int) -> float:
    """When an expression came true last, up to and with a minute since 1970."""
    # The library looks for what lies strictly before.
    after = datetime.fromtimestamp((minute + 1) * MINUTE_S, ZoneInfo(time_zone))
    return float(croniter(cron, after).get_prev(float))
