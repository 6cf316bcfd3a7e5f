"""What a warm pool does next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.drivers.vm.start import warm_pool_levels
from etude.envserver.drivers.vm.start.warm_pool_levels import (
    MOST,
    REST_S,
    RefillBackoff,
    WarmPoolLevel,
    WarmPoolStep,
    WarmPoolTarget,
    Watermark,
)

counts = st.integers(0, MOST)
times = st.floats(0, 1e6)


@st.composite
def targets(draw: st.DrawFn) -> WarmPoolTarget:
    shells, max_shells = sorted([draw(counts), draw(counts)])
    return WarmPoolTarget(paused=draw(counts), shells=shells, max_shells=max_shells)


@given(targets(), counts, counts)
def test_steps_lead_to_the_target_and_then_end(
    target: WarmPoolTarget, paused: int, shells: int
) -> None:
    watermark = Watermark(shells=target.shells)
    for _ in range(4 * MOST):
        match warm_pool_levels.next_step(
            WarmPoolLevel(paused=paused, shells=shells), target, watermark
        ):
            case WarmPoolStep.MAKE_PAUSED:
                paused += 1
            case WarmPoolStep.DROP_PAUSED:
                paused -= 1
            case WarmPoolStep.MAKE_SHELL:
                shells += 1
            case WarmPoolStep.DROP_SHELL:
                shells -= 1
            case None:
                break
    assert (paused, shells) == (target.paused, target.shells)


def test_memory_is_given_back_before_more_is_taken() -> None:
    target = WarmPoolTarget(paused=1, shells=0, max_shells=0)
    assert (
        warm_pool_levels.next_step(WarmPoolLevel(paused=0, shells=1), target, Watermark())
        is WarmPoolStep.DROP_SHELL
    )


@given(targets(), st.lists(st.tuples(st.booleans(), st.floats(0, 300)), max_size=40))
def test_a_watermark_stays_between_what_is_kept_and_what_is_allowed(
    target: WarmPoolTarget, starts: list[tuple[bool, float]]
) -> None:
    watermark, now_s = Watermark(), 0.0
    for is_drained, later_s in starts:
        now_s += later_s
        watermark = watermark.after_rest(target, now_s=now_s)
        assert target.shells <= watermark.shells <= target.max_shells
        watermark = watermark.after_take(target, is_drained=is_drained, now_s=now_s)
        assert target.shells <= watermark.shells <= target.max_shells


def test_a_stock_that_is_drained_doubles_and_one_that_nobody_needs_halves() -> None:
    target = WarmPoolTarget(max_shells=MOST)
    watermark, seen = Watermark(), []
    for _ in range(7):
        watermark = watermark.after_take(target, is_drained=True, now_s=0.0)
        seen.append(watermark.shells)
    assert seen == [2, 4, 8, 16, 32, 64, 64]
    assert watermark.after_take(target, is_drained=False, now_s=1.0).shells == 64
    assert watermark.after_rest(target, now_s=REST_S - 1).shells == 64
    assert watermark.after_rest(target, now_s=REST_S).shells == 32
    assert watermark.after_rest(target, now_s=20 * REST_S).shells == 0


@given(targets(), counts, times, times)
def test_to_look_often_is_to_look_once(
    target: WarmPoolTarget, shells: int, first_s: float, later_s: float
) -> None:
    watermark = Watermark(shells=shells)
    middle = watermark.after_rest(target, now_s=first_s)
    assert (
        middle.after_rest(target, now_s=first_s + later_s).shells
        == watermark.after_rest(target, now_s=first_s + later_s).shells
    )


@given(targets(), counts, times)
def test_a_watermark_knows_when_it_falls_next(
    target: WarmPoolTarget, shells: int, now_s: float
) -> None:
    watermark = Watermark(shells=shells).after_rest(target, now_s=now_s)
    next_s = watermark.next_s(target)
    if next_s is None:
        assert watermark.shells == target.shells
    else:
        assert next_s > now_s
        # Rounding may put the very moment on either side of the minute.
        assert watermark.after_rest(target, now_s=next_s + 1e-3).shells < watermark.shells


def test_a_refill_that_fails_waits_longer_each_time_but_not_for_ever() -> None:
    backoff, waits = RefillBackoff(), []
    for _ in range(100):
        backoff = backoff.failed(now_s=0.0)
        waits.append(backoff.until_s)
    assert waits[:4] == [0.25, 0.5, 1.0, 2.0]
    assert waits[-1] == 60.0


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"paused": -1}, "paused"),
        ({"shells": 3, "max_shells": 2}, "max_shells"),
        ({"max_shells": MOST + 1}, "max_shells"),
        ({"shells": -1}, "shells"),
    ],
)
def test_an_impossible_target_is_refused_by_name(wrong: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        WarmPoolTarget(**wrong)
