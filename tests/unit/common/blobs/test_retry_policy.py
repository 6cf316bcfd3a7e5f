"""When a range is asked for again: after failures, and when it is slow."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.blobs import DeniedError, MissingError, ShortReadError, TransferLimits
from etude.common.blobs.retry_policy import (
    HEDGE_FLOOR_S,
    HEDGE_SAMPLES,
    LONGEST_PAUSE_S,
    Timing,
    hedge_after_s,
    may_hedge,
    may_retry,
    pause_s,
)
from etude.common.errors import StoreError

PACE = TransferLimits(retries_per_range=5, retries_per_transfer=20)


def test_a_range_is_retried_five_times_and_no_more() -> None:
    retried = [may_retry(StoreError("503"), failures=n, retries=0, pace=PACE) for n in range(1, 8)]
    assert retried == [True] * 5 + [False] * 2


def test_a_transfer_has_one_budget_for_all_its_ranges() -> None:
    assert may_retry(StoreError("503"), failures=1, retries=19, pace=PACE)
    assert not may_retry(StoreError("503"), failures=1, retries=20, pace=PACE)


@pytest.mark.parametrize("error", [DeniedError, ShortReadError, MissingError, ZeroDivisionError])
def test_an_answer_that_would_not_change_is_not_asked_for_again(error: type[Exception]) -> None:
    assert not may_retry(error("no"), failures=1, retries=0, pace=PACE)


@given(failures=st.integers(1, 60), chance=st.floats(0, 1, exclude_max=True))
def test_a_pause_is_jittered_from_nothing_to_a_bound_that_doubles(
    failures: int, chance: float
) -> None:
    pause = pause_s(failures, chance)
    assert 0 <= pause <= min(LONGEST_PAUSE_S, 0.1 * 2 ** (failures - 1))
    assert pause_s(failures, 0.0) == 0


@given(st.lists(st.floats(HEDGE_FLOOR_S, 100), min_size=HEDGE_SAMPLES, max_size=64))
def test_a_range_is_slow_when_95_of_100_like_it_were_faster(seconds: Sequence[float]) -> None:
    after_s = hedge_after_s([Timing(100, each) for each in seconds], 100)
    assert after_s is not None
    assert after_s in seconds
    # Definition of a quantile, by counting.
    assert sum(each <= after_s for each in seconds) >= 0.95 * len(seconds)
    assert sum(each < after_s for each in seconds) < 0.95 * len(seconds)


def test_nothing_is_slow_within_a_round_trip() -> None:
    assert hedge_after_s([Timing(100, 0.001)] * 64, 100) == HEDGE_FLOOR_S


def test_nothing_is_slow_before_enough_ranges_like_it_were_answered() -> None:
    few = [Timing(100, 1.0)] * (HEDGE_SAMPLES - 1)
    assert hedge_after_s(few, 100) is None
    assert hedge_after_s([*few, Timing(49, 1.0)], 100) is None
    assert hedge_after_s([*few, Timing(50, 1.0)], 100) == 1.0


def test_second_requests_stay_a_small_share_of_the_load() -> None:
    pace = TransferLimits(hedges_per_range_asked=0.1)
    hedges = 0
    for asked in range(1, 1_001):
        hedges += may_hedge(hedges=hedges, asked=asked, pace=pace)
    assert hedges == 101
