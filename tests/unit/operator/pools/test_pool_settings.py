"""Autoscaler settings of every admitted pool spec."""

from typing import Any

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.autoscaling import ScalingMode
from etude.operator.pools.acceptance import schedule_problems
from etude.operator.pools.autoscaling.config import pool_config


def understood(**spec: Any) -> EnvPool:
    return EnvPool.parse_known_fields(
        {
            "apiVersion": "etude.dev/v1alpha1",
            "kind": "EnvPool",
            "metadata": {"name": "repos", "namespace": "lab"},
            "spec": {"templates": [{"name": "python"}], "maxReplicas": 20, **spec},
        }
    )


percents = st.one_of(st.integers(1, 4), st.integers(1, 100))
scaling = st.fixed_dictionaries(
    {"mode": st.sampled_from(["Reactive", "Predictive"])},
    optional={
        "targetUtilizationPercent": percents,
        "stableWindowSeconds": st.integers(10, 3_600),
        "panicWindowPercent": percents,
        "panicThresholdPercent": st.integers(110, 1_000),
        "maxScaleUpRate": st.integers(2, 10_000),
        "maxScaleDownRate": st.integers(2, 1_000),
        "scaleDownDelaySeconds": st.integers(0, 86_400),
        "burstCapacity": st.integers(0, 1_000),
        "scaleToZero": st.fixed_dictionaries({"mode": st.sampled_from(["Never", "WhenIdle"])}),
        "schedule": st.lists(
            st.fixed_dictionaries(
                {"cron": st.just("0 8 * * *"), "minIdle": st.integers(0, 1_000_000)}
            ),
            max_size=2,
        ),
        "refill": st.fixed_dictionaries(
            {"maxPerSecond": st.integers(1, 1_000), "maxInFlight": st.integers(1, 10_000)}
        ),
    },
)
predictive = st.fixed_dictionaries(
    {},
    optional={
        "serviceLevelPercent": st.integers(50, 99),
        "costs": st.just({"gpuSecond": "0.001", "sandboxSecond": "0"}),
        "maxHorizonSeconds": st.integers(1, 86_400),
        "planStaleSeconds": st.integers(1, 86_400),
    },
)
sizes = st.fixed_dictionaries(
    {},
    optional={
        "maxReplicas": st.integers(1, 50),
        "minIdle": st.integers(0, 100),
        "slotsPerReplica": st.integers(1, 4),
        "overcommitFactor": st.sampled_from(["0", "0.5", "1", "1.5", "1e3"]),
    },
)


@given(scaling, predictive, sizes)
def test_every_admitted_pool_that_sizes_itself_can_be_decided_about(
    how: dict[str, Any], plans: dict[str, Any], size: dict[str, Any]
) -> None:
    if plans and how["mode"] == "Predictive":
        how = {**how, "predictive": plans}
    try:
        pool = understood(autoscaling=how, **size)
    except ValidationError:
        reject()
    assume(not list(schedule_problems(pool.spec, at="spec")))
    config = pool_config(pool.spec)

    assert (config.while_planned is None) == (pool.spec.mode is ScalingMode.REACTIVE)


@pytest.mark.parametrize(("percent", "short_s"), [(2, 1.0), (3, 1.0), (4, 1.2), (10, 3.0)])
def test_a_share_of_the_shorter_window_with_a_plan_is_a_second_at_least(
    percent: int, short_s: float
) -> None:
    config = pool_config(understood(autoscaling={"panicWindowPercent": percent}).spec)

    assert config.while_planned is not None
    assert config.while_planned.panic_window_s == pytest.approx(short_s)
    assert config.autoscaling.panic_window_s == pytest.approx(0.6 * percent)
