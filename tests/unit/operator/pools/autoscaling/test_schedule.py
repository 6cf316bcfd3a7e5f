"""The active entry of a schedule."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from etude.common.api.pool.autoscaling import ScheduleEntry
from etude.operator.pools.autoscaling.limits import scheduled_idle

OFFICE = (
    ScheduleEntry(cron="0 8 * * 1-5", min_idle=64, time_zone="Europe/Berlin"),
    ScheduleEntry(cron="0 18 * * 1-5", min_idle=4, time_zone="Europe/Berlin"),
)


def at(text: str, zone: str = "Europe/Berlin") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("moment", "idle"),
    [
        ("2026-11-23T07:59:59", 4),
        ("2026-11-23T08:00:00", 64),
        ("2026-11-23T17:59:00", 64),
        ("2026-11-23T18:00:30", 4),
        # A Saturday: Friday's evening still holds.
        ("2026-11-28T12:00:00", 4),
    ],
)
def test_the_entry_whose_moment_came_last_holds(moment: str, idle: int) -> None:
    assert scheduled_idle(OFFICE, wall_s=at(moment)) == idle


def test_moments_are_those_of_the_time_zone_in_summer_and_in_winter() -> None:
    assert scheduled_idle(OFFICE, wall_s=at("2026-07-06T06:00:00", "UTC")) == 64
    assert scheduled_idle(OFFICE, wall_s=at("2026-01-05T06:59:00", "UTC")) == 4
    assert scheduled_idle(OFFICE, wall_s=at("2026-01-05T07:00:00", "UTC")) == 64


def test_of_entries_at_one_moment_the_most_holds() -> None:
    twice = (
        ScheduleEntry(cron="0 8 * * *", min_idle=8),
        ScheduleEntry(cron="0 8 * * *", min_idle=2),
    )

    assert scheduled_idle(twice, wall_s=at("2026-11-23T09:00:00", "UTC")) == 8
    assert scheduled_idle((), wall_s=0.0) == 0
