"""Laws of the number of engines."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from etude.operator.runs.capacity.engine_count import PACE, TOLERANCE, Bounds, Signals, wanted

COUNTS = st.integers(1, 64)
SECONDS = st.floats(0.1, 1e4)
BOUNDS = st.builds(
    lambda least, more, step_s: Bounds(least, least + more, step_s),
    COUNTS,
    st.integers(0, 64),
    SECONDS,
)
SIGNALS = st.builds(Signals, st.floats(0, 1e7), SECONDS, st.floats(0, 1e3), st.integers(0, 64))


@given(SIGNALS, BOUNDS, COUNTS)
def test_the_bounds_hold_and_the_same_figures_give_the_same_number(
    signals: Signals, bounds: Bounds, present: int
) -> None:
    found = wanted(signals, bounds, present)
    assert bounds.least <= found <= bounds.most
    assert wanted(signals, bounds, present) == found


@given(SIGNALS, BOUNDS, COUNTS)
def test_nothing_grows_or_shrinks_faster_than_the_pace(
    signals: Signals, bounds: Bounds, present: int
) -> None:
    assume(bounds.least <= present <= bounds.most)
    found = wanted(signals, bounds, present)
    assert math.ceil(present / PACE) <= found <= PACE * present


@given(SIGNALS, BOUNDS, COUNTS, st.floats(1, 10))
def test_longer_waits_never_take_engines_away(
    signals: Signals, bounds: Bounds, present: int, factor: float
) -> None:
    longer = signals._replace(wait_s=factor * signals.wait_s)
    assert wanted(longer, bounds, present) >= wanted(signals, bounds, present)


@given(SIGNALS, BOUNDS, COUNTS, st.floats(1, 10))
def test_a_step_that_may_take_longer_never_needs_more_engines(
    signals: Signals, bounds: Bounds, present: int, factor: float
) -> None:
    looser = bounds._replace(step_s=factor * bounds.step_s)
    assert wanted(signals, looser, present) <= wanted(signals, bounds, present)


@given(BOUNDS, COUNTS, st.sampled_from(["tokens", "wait_s", "engines"]))
def test_without_figures_nothing_changes(bounds: Bounds, present: int, missing: str) -> None:
    signals = Signals(1e5, 60.0, 10.0, 4)._replace(**{missing: 0})
    assume(bounds.least <= present <= bounds.most)
    assert wanted(signals, bounds, present) == present


@given(
    tokens=st.floats(1e3, 1e7),
    rate=st.floats(10, 1e5),
    work_s=st.floats(0, 100),
    room_s=st.floats(1, 1e3),
    bounds=BOUNDS,
    start=COUNTS,
)
def test_engines_of_one_speed_settle_where_a_step_takes_what_it_should(
    *, tokens: float, rate: float, work_s: float, room_s: float, bounds: Bounds, start: int
) -> None:
    bounds = bounds._replace(step_s=work_s + room_s)
    count = max(bounds.least, min(start, bounds.most))
    history = [count]
    for _ in range(2 + 2 * math.ceil(math.log2(128))):
        count = wanted(Signals(tokens, tokens / (rate * count), work_s, count), bounds, count)
        history.append(count)
    assert history[-1] == history[-2]
    wait_s = tokens / (rate * count)
    assert count == bounds.most or wait_s <= room_s * (1 + TOLERANCE) * 1.001
    fewer = tokens / (rate * (count - 1)) if count > bounds.least else math.inf
    assert fewer >= room_s * (1 - TOLERANCE) * 0.999


def test_the_example_of_the_docs() -> None:
    # 4 engines sample 480,000 tokens in 120 s: 1,000 a second each. 60 s - 20 s are left for it.
    signals = Signals(tokens=480_000, wait_s=120, work_s=20, engines=4)
    assert wanted(signals, Bounds(2, 16, 60), 4) == 8
    assert wanted(signals._replace(wait_s=60, engines=8), Bounds(2, 16, 60), 8) == 12
    assert wanted(signals._replace(wait_s=40, engines=12), Bounds(2, 16, 60), 12) == 12
