"""The curve of the length penalty, and the demo's use of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.run.rewards import LengthPenaltyParameters
from etude.rewards.functions import length_penalty
from etude.v1 import rollout_pb2

DEMO = LengthPenaltyParameters.model_validate(
    {
        "q": 0,
        "power": 2,
        "weights": {"promptTokens": 1, "completionTokens": 1, "toolOutputTokens": 1},
        "free": 260,
        "scale": 220,
        "cap": 1,
        "onlyOnSuccess": True,
    }
)


def _of_length(tokens: int) -> rollout_pb2.Rollout:
    costs = rollout_pb2.Costs(
        prompt_tokens=45, tool_output_tokens=60, completion_tokens=tokens - 105
    )
    return rollout_pb2.Rollout(costs=costs)


@pytest.mark.parametrize(
    ("q", "x", "expected"),
    [
        (0.5, 10, 8.28),
        (0.5, 100, 46.3),
        (0.5, 1000, 181),
        (1, 10, 6.93),
        (1, 100, 24.0),
        (1, 1000, 46.2),
        (2, 10, 5.0),
        (2, 100, 9.09),
        (2, 1000, 9.90),
    ],
)
def test_the_curve_has_the_published_check_values(q: float, x: float, expected: float) -> None:
    assert length_penalty.length_cost(x, k=0.1, q=q) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("q", [-1, 0, 0.5, 1, 1 + 1e-12, 3])
def test_the_curve_starts_at_zero_with_slope_one(q: float) -> None:
    assert length_penalty.length_cost(0, k=0.1, q=q) == 0
    assert length_penalty.length_cost(1e-6, k=0.1, q=q) == pytest.approx(1e-6, rel=1e-5)


def test_the_curve_is_continuous_in_its_bend_at_the_logarithm() -> None:
    at, beside = (length_penalty.length_cost(500, k=0.1, q=q) for q in (1, 1 + 1e-9))
    assert at == pytest.approx(beside, rel=1e-6)


@pytest.mark.parametrize("tokens", [120, 260, 261, 300, 370, 479, 480, 700])
def test_the_demo_penalty_is_its_quadratic_exactly(tokens: int) -> None:
    expected = min(1.0, max(0.0, (tokens - 260) / 220)) ** 2
    assert length_penalty.penalty(_of_length(tokens), DEMO, success=1.0) == expected


def test_a_failure_is_not_charged_for_its_length_when_only_success_is() -> None:
    assert length_penalty.penalty(_of_length(480), DEMO, success=0.0) == 0


def test_every_cost_weight_counts() -> None:
    costs = rollout_pb2.Costs(
        prompt_tokens=1,
        completion_tokens=2 + 6 + 7,
        thinking_tokens=2,
        tool_output_tokens=3,
        tool_calls=4,
        turns=5,
        final_message_tokens=6,
    )
    names = (
        *("promptTokens", "thinkingTokens", "toolOutputTokens", "toolCalls", "turns"),
        *("finalMessageTokens", "toolCallTokens"),
    )
    zero = dict.fromkeys((*names, "completionTokens"), 0.0)
    for count, name in enumerate(names, start=1):
        chosen = LengthPenaltyParameters.model_validate({"weights": zero | {name: 10.0}})
        assert length_penalty.weighted_costs(costs, chosen.weights) == 10 * count
    sampled = LengthPenaltyParameters.model_validate({"weights": zero | {"completionTokens": 1.0}})
    assert length_penalty.weighted_costs(costs, sampled.weights) == 15


COSTS = st.builds(
    rollout_pb2.Costs,
    thinking_tokens=st.integers(0, 10**6),
    final_message_tokens=st.integers(0, 10**6),
    tool_output_tokens=st.integers(0, 10**6),
    tool_calls=st.integers(0, 10**4),
    turns=st.integers(0, 10**4),
)


@given(costs=COSTS, more=COSTS, calls=st.integers(0, 10**6), q=st.sampled_from([0, 0.5, 1, 2, 8]))
def test_no_cost_lowers_the_penalty(
    costs: rollout_pb2.Costs, more: rollout_pb2.Costs, calls: int, q: float
) -> None:
    weights = {"thinkingTokens": 1, "toolCallTokens": 2, "finalMessageTokens": 3, "turns": 4}
    chosen = LengthPenaltyParameters.model_validate(
        {"q": q, "weights": weights | {"toolOutputTokens": 0.5, "toolCalls": 6}}
    )
    longer = rollout_pb2.Costs()
    for name in rollout_pb2.Costs.DESCRIPTOR.fields_by_name:
        setattr(longer, name, getattr(costs, name) + getattr(more, name))
    for each in (costs, longer):
        each.completion_tokens = each.thinking_tokens + each.final_message_tokens + calls
    before, after = (
        length_penalty.penalty(rollout_pb2.Rollout(costs=each), chosen, success=1.0)
        for each in (costs, longer)
    )
    assert 0 <= before <= after * (1 + 1e-12)
