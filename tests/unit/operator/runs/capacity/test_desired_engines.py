"""Laws of the number of engines."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from etude.operator.runs.capacity.engine_count import (
    MAX_FACTOR,
    TOLERANCE,
    EngineBounds,
    StepSignals,
    desired_engines,
)

COUNTS = st.integers(1, 64)
SECONDS = st.floats(0.1, 1e4)
BOUNDS = st.builds(
    lambda least, more, step_s: EngineBounds(least, least + more, step_s),
    COUNTS,
    st.integers(0, 64),
    SECONDS,
)
SIGNALS = st.builds(StepSignals, st.floats(0, 1e7), SECONDS, st.floats(0, 1e3), st.integers(0, 64))


@given(SIGNALS, BOUNDS, COUNTS)
def test_the_bounds_hold_and_the_same_figures_give_the_same_number(
    signals: StepSignals, bounds: EngineBounds, present: int
) -> None:
    found = desired_engines(signals, bounds, present)
    assert bounds.least <= found <= bounds.most
    assert desired_engines(signals, bounds, present) == found


@given(SIGNALS, BOUNDS, COUNTS)
def test_nothing_grows_or_shrinks_faster_than_the_pace(
    signals: StepSignals, bounds: EngineBounds, present: int
) -> None:
    assume(bounds.least <= present <= bounds.most)
    found = desired_engines(signals, bounds, present)
    assert math.ceil(present / MAX_FACTOR) <= found <= MAX_FACTOR * present


@given(SIGNALS, BOUNDS, COUNTS, st.floats(1, 10))
def test_longer_waits_never_take_engines_away(
    signals: StepSignals, bounds: EngineBounds, present: int, factor: float
) -> None:
    longer = signals._replace(wait_s=factor * signals.wait_s)
    assert desired_engines(longer, bounds, present) >= desired_engines(signals, bounds, present)


@given(SIGNALS, BOUNDS, COUNTS, st.floats(1, 10))
def test_a_step_that_may_take_longer_never_needs_more_engines(
    signals: StepSignals, bounds: EngineBounds, present: int, factor: float
) -> None:
    looser = bounds._replace(step_s=factor * bounds.step_s)
    assert desired_engines(signals, looser, present) <= desired_engines(signals, bounds, present)


@given(BOUNDS, COUNTS, st.sampled_from(["tokens", "wait_s", "engines"]))
def test_without_figures_nothing_changes(bounds: EngineBounds, present: int, missing: str) -> None:
    signals = StepSignals(1e5, 60.0, 10.0, 4)._replace(**{missing: 0})
    assume(bounds.least <= present <= bounds.most)
    assert desired_engines(signals, bounds, present) == present


@given(
    tokens=st.floats(1e3, 1e7),
    rate=st.floats(10, 1e5),
    work_s=st.floats(0, 100),
    room_s=st.floats(1, 1e3),
    bounds=BOUNDS,
    start=COUNTS,
)
def test_engines_of_one_speed_settle_where_a_step_takes_what_it_should(
    *, tokens: float, rate: float, work_s: float, room_s: float, bounds: EngineBounds, start: int
) -> None:
    bounds = bounds._replace(step_s=work_s + room_s)
    count = max(bounds.least, min(start, bounds.most))
    history = [count]
    for _ in range(2 + 2 * math.ceil(math.log2(128))):
        count = desired_engines(
            StepSignals(tokens, tokens / (rate * count), work_s, count), bounds, count
        )
        history.append(count)
    assert history[-1] == history[-2]
    wait_s = tokens / (rate * count)
    assert count == bounds.most or wait_s <= room_s * (1 + TOLERANCE) * 1.001
    fewer = tokens / (rate * (count - 1)) if count > bounds.least else math.inf
    assert fewer >= room_s * (1 - TOLERANCE) * 0.999


def test_the_example_of_the_docs() -> None:
    # 4 engines sample 480,000 tokens in 120 s: 1,000 a second each. 60 s - 20 s are left for it.
    signals = StepSignals(tokens=480_000, wait_s=120, work_s=20, engines=4)
    assert desired_engines(signals, EngineBounds(2, 16, 60), 4) == 8
    assert desired_engines(signals._replace(wait_s=60, engines=8), EngineBounds(2, 16, 60), 8) == 12
    assert (
        desired_engines(signals._replace(wait_s=40, engines=12), EngineBounds(2, 16, 60), 12) == 12
    )
