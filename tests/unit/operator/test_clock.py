"""Which time it is for the operator, when clocks disagree."""

import time

import pytest

from etude.operator.clock import ServerClock, SystemClock

DATE = "Sat, 01 Jan 2000 12:00:00 GMT"
NOON_S = 946_728_000.0
MINUTE_S = 60.0
"""No test of this file takes longer."""


def test_p15_a_replica_whose_clock_is_wrong_goes_by_the_api_servers() -> None:
    clock = ServerClock()
    clock.set_from_header(DATE)
    assert NOON_S <= clock.wall_s() < NOON_S + MINUTE_S


@pytest.mark.parametrize("step_s", [3_600.0, -3_600.0])
def test_p15_a_clock_that_is_set_moves_no_deadline(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    clock = ServerClock()
    clock.set_from_header(DATE)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + step_s)
    assert NOON_S <= clock.wall_s() < NOON_S + MINUTE_S


def test_p15_an_api_server_whose_clock_is_set_moves_no_deadline() -> None:
    clock = ServerClock()
    clock.set_from_header(DATE)
    clock.set_from_header("Sat, 01 Jan 2000 13:00:00 GMT")
    assert NOON_S <= clock.wall_s() < NOON_S + MINUTE_S


def test_without_an_answer_or_with_one_that_has_no_time_this_machines_clock_is_all_there_is() -> (
    None
):
    clock = ServerClock()
    for date in (None, "", "yesterday"):
        clock.set_from_header(date)
        assert abs(clock.wall_s() - SystemClock().wall_s()) < MINUTE_S
