"""Knative's formulas, by hand: 10 slots wanted by a pool of replicas with one slot each."""

import pytest

from etude.operator.pools.autoscaling.config import ScalingParameters
from etude.operator.pools.autoscaling.reactive import (
    PanicState,
    excess_burst_capacity,
    reactive_size,
)
from etude.operator.pools.autoscaling.windows import Sample

CONFIG = ScalingParameters()


def steady(value: float, *, until_s: float = 60.0) -> tuple[Sample, ...]:
    """Demand as it was seen every two seconds of a window."""
    return tuple(Sample(float(at_s), value) for at_s in range(2, int(until_s) + 1, 2))


def test_demand_over_utilisation_is_wanted() -> None:
    # ceil(10 / 0.8) = 13; 13 / 13 is no panic.
    found = reactive_size(steady(10), None, CONFIG, ready=13, slots=1, now_s=60.0)

    assert found is not None
    assert (found.replicas, found.stable, found.panicked, found.panic) == (13, 10.0, 10.0, None)


def test_slots_share_a_replica() -> None:
    # ceil(10 / (4 x 0.8)) = 4
    found = reactive_size(steady(10), None, CONFIG, ready=4, slots=4, now_s=60.0)

    assert found is not None
    assert found.replicas == 4


def test_a_pool_shrinks_by_no_more_than_half_at_once() -> None:
    # ceil(1 / 0.8) = 2, but floor(13 / 2) = 6.
    found = reactive_size(steady(1), None, CONFIG, ready=13, slots=1, now_s=60.0)

    assert found is not None
    assert found.replicas == 6


def test_a_pool_grows_no_more_than_tenfold_at_once() -> None:
    # ceil(100 / 0.8) = 125, but ceil(10 x 2) = 20, which is panic: 125 / 2 >= 2.
    found = reactive_size(steady(100), None, CONFIG, ready=2, slots=1, now_s=60.0)

    assert found is not None
    assert found.replicas == 20
    assert found.panic == PanicState(60.0, 20)


def test_a_burst_is_seen_in_the_panic_window_first() -> None:
    # 57 s of 1 and three samples of 10: V_p = 10, V_s = (27 x 1 + 3 x 10) / 30 = 1.9.
    samples = (*steady(1, until_s=54), *(Sample(at_s, 10) for at_s in (56.0, 58.0, 60.0)))

    found = reactive_size(samples, None, CONFIG, ready=2, slots=1, now_s=60.0)

    assert found is not None
    assert found.stable == pytest.approx(1.9)
    assert found.panicked == 10
    # ceil(10 / 0.8) = 13 over 2 ready is panic; ceil(10 x 2) = 20 admits it.
    assert found.replicas == 13


def test_panic_ends_a_stable_window_after_demand_was_last_too_large() -> None:
    still = reactive_size(steady(1), PanicState(0.0, 13), CONFIG, ready=13, slots=1, now_s=60.0)
    over = reactive_size(steady(1), PanicState(-0.5, 13), CONFIG, ready=13, slots=1, now_s=60.0)

    assert still is not None
    assert over is not None
    assert (still.replicas, still.panic) == (13, PanicState(0.0, 13))
    assert (over.replicas, over.panic) == (6, None)


def test_without_samples_nothing_is_decided() -> None:
    assert reactive_size((), None, CONFIG, ready=3, slots=1, now_s=60.0) is None
    assert reactive_size(steady(5), None, CONFIG, ready=3, slots=1, now_s=1_000.0) is None


def test_what_a_burst_would_leave_is_counted_in_slots() -> None:
    assert excess_burst_capacity(10.0, ready=13, slots=1, burst=0) == 3
    assert excess_burst_capacity(10.5, ready=3, slots=4, burst=5) == -4
