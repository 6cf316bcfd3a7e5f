"""Nonlinear length penalty: steep where effort is cheap, flat where the task is hard."""

import math

from etude.common.api.run.rewards import CostWeights, LengthPenaltyParameters
from etude.rewards.functions.base import Penalty
from etude.v1 import rollout_pb2


def length_cost(x: float, *, k: float, q: float) -> float:
    """C(x) = ((1 + kx)^(1-q) - 1) / (k(1 - q)), its limits for q = 1 and k = 0 included.

    C(0) = 0 and C'(x) = (1 + kx)^(-q). Written with expm1 and log1p: near q = 1 and k = 0 the
    formula as printed subtracts nearly equal numbers.

    Source: the Composer 2 report's length penalty.
    """
    if k == 0 or x == 0:
        return x
    grown = math.log1p(k * x)
    if q == 1:
        return grown / k
    return math.expm1((1 - q) * grown) / (k * (1 - q))


def weighted_costs(costs: rollout_pb2.Costs, weights: CostWeights) -> float:
    """The rollout's costs as one amount."""
    return (
        weights.prompt_tokens * costs.prompt_tokens
        + weights.completion_tokens * costs.completion_tokens
        + weights.thinking_tokens * costs.thinking_tokens
        + weights.tool_call_tokens * tool_call_tokens(costs)
        + weights.final_message_tokens * costs.final_message_tokens
        + weights.tool_output_tokens * costs.tool_output_tokens
        + weights.tool_calls * costs.tool_calls
        + weights.turns * costs.turns
    )


def tool_call_tokens(costs: rollout_pb2.Costs) -> int:
    """Sampled tokens outside of thinking in completions with tool calls."""
    return costs.completion_tokens - costs.thinking_tokens - costs.final_message_tokens


def penalty(
    rollout: rollout_pb2.Rollout, parameters: LengthPenaltyParameters, success: float
) -> float:
    """Penalty of the rollout's length, before the function's weight; never negative."""
    if parameters.only_on_success and success < 1:
        return 0.0
    x = (
        max(0.0, weighted_costs(rollout.costs, parameters.weights) - parameters.free)
        / parameters.scale
    )
    if parameters.cap is not None:
        x = min(parameters.cap, x)
    return math.pow(length_cost(x, k=parameters.k, q=parameters.q), parameters.power)


FUNCTION = Penalty(version="1", parameters=LengthPenaltyParameters, penalty=penalty)
