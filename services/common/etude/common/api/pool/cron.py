"""Moments of cron expressions in a time zone."""

import functools
from datetime import datetime
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import CroniterError, croniter

MINUTE_S = 60
_ANY_MINUTE = 30_000_000


class ScheduleProblem(NamedTuple):
    """A wrong field of a schedule entry, with a suggested fix."""

    field: str
    what: str
    fix: str


def find_problem(cron: str, time_zone: str) -> ScheduleProblem | None:
    """The fault of an expression or a time zone that no pattern can express; None if valid."""
    if len(cron.split()) != 5 or not croniter.is_valid(cron):
        return ScheduleProblem("cron", f'"{cron}" is no five cron fields', 'such as "0 8 * * 1-5"')
    try:
        ZoneInfo(time_zone)
        last_occurrence(cron, time_zone, _ANY_MINUTE)
    except CroniterError:
        return ScheduleProblem(
            "cron", f'"{cron}" names a moment that never comes', "name a day that does"
        )
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return ScheduleProblem(
            "timeZone", f'"{time_zone}" is unknown', 'name one such as "Europe/Berlin"'
        )
    return None


# Pools share few expressions, and a look back costs a quarter of a millisecond.
@functools.lru_cache(maxsize=1024)
def last_occurrence(cron: str, time_zone: str, minute: int) -> float:
    """Time in seconds at which an expression came true last, up to and with a minute since 1970."""
    # The library looks for what lies strictly before.
    after = datetime.fromtimestamp((minute + 1) * MINUTE_S, ZoneInfo(time_zone))
    return float(croniter(cron, after).get_prev(float))
