"""How long provisioning takes, and how many replicas that makes necessary."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.pool.autoscaling import AutoscalingCosts, PredictiveScaling
from etude.common.plans.forecast import assurance
from etude.operator.pools.autoscaling.config import ScalingParameters
from etude.operator.pools.autoscaling.predictive import service_level
from etude.operator.pools.autoscaling.provisioning import (
    PRIOR,
    PRIOR_WEIGHT,
    ProvisionTime,
    add_first_start,
    estimate_provision,
    with_spares,
)
from etude.operator.pools.autoscaling.values import DemandPlan

times = st.lists(st.one_of(st.none(), st.floats(0.1, 600)), max_size=50)


def test_what_is_assumed_counts_until_enough_was_seen() -> None:
    assert estimate_provision([]) == PRIOR
    few = estimate_provision([10.0] * PRIOR_WEIGHT)
    many = estimate_provision([10.0] * 500)

    assert few.p50_s == pytest.approx((PRIOR.p50_s + 10) / 2)
    assert many.p95_s == pytest.approx(10.0, abs=1.0)


@given(times)
def test_quantiles_lie_between_what_was_seen_and_what_was_assumed(
    took_s: list[float | None],
) -> None:
    found = estimate_provision(took_s)
    seen = [each for each in took_s if each is not None] or [PRIOR.p50_s]

    assert min(*seen, PRIOR.p50_s) - 1e-9 <= found.p50_s <= max(*seen, PRIOR.p50_s) + 1e-9
    assert found.p50_s <= found.p95_s + 1e-9
    assert 0 <= found.failing < 1


@pytest.mark.parametrize("failing", [0.0, 0.15])
def test_spares_are_enough_as_often_as_is_asked_for(failing: float) -> None:
    random, took = Random(4), ProvisionTime(20.0, 40.0, failing)
    begun = with_spares(256, 56, took, assurance(0.95))
    enough = 0
    for _ in range(1_000):
        in_time = sum(random.random() < took.punctual_share for _ in range(begun - 56))
        enough += 56 + in_time >= 256

    assert 0.9 <= enough / 1_000 <= 0.99


@given(st.integers(0, 300), st.integers(0, 300), st.floats(0, 0.9))
def test_no_spares_are_begun_for_what_is_ready(wanted: int, ready: int, failing: float) -> None:
    found = with_spares(wanted, ready, ProvisionTime(20.0, 40.0, failing), assurance(0.95))

    assert found == wanted if ready >= wanted else found > wanted


def test_the_service_level_is_the_newsvendors_where_costs_are_known() -> None:
    plan = DemandPlan(run_id="r", version=1, heard_s=0.0, until_s=1.0, waves=(), gpus=8)
    costs = AutoscalingCosts(gpu_second="0.001", sandbox_second="0.0001")
    usual = ScalingParameters(predictive=PredictiveScaling(service_level_percent=95))
    priced = ScalingParameters(predictive=PredictiveScaling(service_level_percent=95, costs=costs))
    took = ProvisionTime(30.0, 60.0)

    # 8 x 0.001 x 30 s = 0.24 over 0.24 + 0.0001 x 120 s.
    assert service_level(priced, [plan], took).share == pytest.approx(0.24 / 0.252)
    assert service_level(usual, [plan], took).share == 0.95
    unknown = DemandPlan(run_id="r", version=1, heard_s=0.0, until_s=1.0, waves=())
    assert math.isclose(service_level(priced, [unknown], took).share, 0.95)


@given(st.floats(0, 600), st.integers(0, 10_000))
def test_what_comes_after_a_provision_counts_the_more_often_it_was_seen(
    more_s: float, count: int
) -> None:
    took = ProvisionTime(20.0, 40.0, 0.1)
    found, better_known = (
        add_first_start(took, more_s, more_s, seen) for seen in (count, count + 1)
    )

    assert took.p95_s <= found.p95_s <= better_known.p95_s <= took.p95_s + more_s
    assert add_first_start(took, more_s, more_s, 0) == took
    assert found.failing == took.failing
