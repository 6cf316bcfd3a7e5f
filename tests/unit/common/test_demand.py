"""Demand of the last minutes, and what has to be ready for it."""

from hypothesis import given
from hypothesis import strategies as st

from etude.common.demand import MARGIN, WINDOW_S, DemandPeak, units_needed

COUNTS = st.integers(0, 50)


@given(st.lists(st.tuples(st.floats(0.1, 100.0), COUNTS), max_size=30))
def test_the_peak_is_the_highest_demand_of_the_window(grown: list[tuple[float, int]]) -> None:
    peak, demands, now_s = DemandPeak(), list[tuple[float, int]](), 0.0
    for passed_s, units in grown:
        now_s += passed_s
        peak.record(units, now_s=now_s)
        demands.append((now_s, units))
        newest = [count for at_s, count in demands if now_s - at_s <= WINDOW_S]
        assert peak.highest(now_s=now_s) == max(newest)
    assert peak.highest(now_s=now_s + 2 * WINDOW_S) == 0


@given(COUNTS)
def test_a_third_more_than_the_peak_is_ready_and_one_at_least(peak: int) -> None:
    needed = units_needed(peak)
    assert MARGIN * peak <= needed < MARGIN * peak + 1
    assert needed > peak or not peak
