"""Open completions follow the load of engines, within their bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.routing.concurrency import (
    ConcurrencyBounds,
    EngineSample,
    has_too_much,
    join_samples,
    next_limit,
)

BOUNDS = ConcurrencyBounds(4, 400)
_SAMPLES = st.builds(
    EngineSample,
    running=st.integers(0, 1_000),
    waiting=st.integers(0, 1_000),
    kv_cache_usage=st.floats(0, 1),
    preemptions=st.integers(0, 10),
)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        pytest.param(EngineSample(100, 11, 0.5, 0), 90, id="engines queue"),
        pytest.param(EngineSample(100, 0, 0.95, 0), 90, id="the cache is full"),
        pytest.param(EngineSample(100, 0, 0.5, 1), 90, id="a request lost its room"),
        pytest.param(EngineSample(95, 0, 0.5, 0), 102, id="room, and all of it is used"),
        pytest.param(EngineSample(40, 0, 0.5, 0), 100, id="room that nobody uses"),
        pytest.param(EngineSample(95, 1, 0.5, 0), 100, id="hardly a queue"),
        pytest.param(EngineSample(95, 0, 0.85, 0), 100, id="nearly full"),
    ],
)
def test_the_limit_falls_fast_and_rises_slowly(load: EngineSample, expected: int) -> None:
    assert next_limit(100, load, BOUNDS) == expected


@given(limit=st.integers(1, 1_000), load=_SAMPLES)
def test_no_load_leads_out_of_the_bounds_or_up_from_too_much(
    limit: int, load: EngineSample
) -> None:
    new = next_limit(limit, load, BOUNDS)
    assert BOUNDS.least <= new <= BOUNDS.most
    if has_too_much(load):
        assert new < limit or new == BOUNDS.least
    else:
        assert new >= BOUNDS.clamp(limit)


@given(loads=st.lists(_SAMPLES, min_size=1, max_size=5))
def test_one_engine_with_a_full_cache_is_enough(loads: list[EngineSample]) -> None:
    full = EngineSample(1, 0, 1.0, 0)
    assert has_too_much(join_samples([*loads, full]))


def test_engines_with_room_for_100_lead_a_limit_near_it() -> None:
    limit, seen = BOUNDS.most, []
    for _ in range(200):
        load = EngineSample(min(limit, 100), max(0, limit - 100), 0.5, 0)
        limit = next_limit(limit, load, BOUNDS)
        seen.append(limit)
    assert 90 <= min(seen[40:]) <= max(seen[40:]) <= 115
