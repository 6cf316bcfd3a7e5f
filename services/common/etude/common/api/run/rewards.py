"""Parameters of the reward functions, as roles.rewards.functions[] of a run gives them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from etude.common.api.meta import Model

Amount = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class VerifierParameters(Model):
    """Runs the task's hidden tests on the agent's changes; 1 when they pass, 0 when not."""

    only_when_finished: bool = False
    """True gives 0 without running anything to a rollout that did not end by itself."""
    retries: Annotated[int, Field(ge=0, le=5)] = 1
    """Further attempts, each in a fresh environment, after the platform failed."""


class CostWeights(Model):
    """Weight of one unit of each cost in the penalised amount x."""

    prompt_tokens: Amount = 0
    """Per token of the opening prompt."""
    completion_tokens: Amount = 1
    """Per token that the policy sampled."""
    tool_output_tokens: Amount = 0.2
    """Per token that the harness inserted between turns: tool output and its frame."""
    tool_calls: Amount = 0
    """Per tool call."""
    turns: Amount = 0
    """Per turn; parallel calls share one."""


class LengthPenaltyParameters(Model):
    """Penalty C(x)^power, with x = min(cap, max(0, weighted costs - free) / scale).

    C(x) = ((1 + kx)^(1-q) - 1) / (k(1 - q)), which is linear for q = 0, concave for q > 0 and
    bounded by 1/(k(q-1)) for q > 1. k = 0 is linear too.
    """

    k: Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)] = 0.1
    """How early the curve bends."""
    q: Annotated[float, Field(ge=-4, le=8, allow_inf_nan=False)] = 1
    """How strongly it bends: 0 not at all, 1 to a logarithm, below 0 upwards."""
    power: Annotated[float, Field(gt=0, le=8, allow_inf_nan=False)] = 1
    """Exponent applied to C; 2 with q 0 makes the penalty quadratic."""
    weights: CostWeights = Field(default_factory=CostWeights)
    """What counts as length."""
    free: Amount = 0
    """Weighted costs up to this are not penalised."""
    scale: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1000
    """Weighted costs, beyond the free ones, that make x = 1."""
    cap: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Largest x; unlimited unless set."""
    only_on_success: bool = False
    """True spares rollouts whose verifier did not reach 1: a failure must not pay for trying."""


class BrokenCallsParameters(Model):
    """1 for a rollout with at least one malformed, unknown or refused tool call."""


class UnfinishedParameters(Model):
    """1 for a rollout that a limit ended instead of the policy."""


Parameters = (
    VerifierParameters | LengthPenaltyParameters | BrokenCallsParameters | UnfinishedParameters
)

PARAMETERS: Mapping[str, type[Parameters]] = MappingProxyType(
    {
        "Verifier": VerifierParameters,
        "LengthPenalty": LengthPenaltyParameters,
        "BrokenCalls": BrokenCallsParameters,
        "Unfinished": UnfinishedParameters,
    }
)
"""Model of each function's parameters, by the function's name in a manifest."""


def check_function(function: str, parameters: Mapping[str, JsonValue]) -> Parameters:
    """The parameters as their model, defaults filled in.

    Raises:
        ValueError: no such function, or a parameter that it does not have or does not accept; the
            message names it.
    """
    model = PARAMETERS.get(function)
    if model is None:
        raise ValueError(f"function: {function!r} is not one of {', '.join(PARAMETERS)}")
    try:
        return model.model_validate(dict(parameters))
    except ValidationError as cause:
        found = "; ".join(_sentence(function, error) for error in cause.errors())
        raise ValueError(found) from cause


def _sentence(function: str, error: ErrorDetails) -> str:
    path = ".".join(("parameters", *(str(part) for part in error["loc"])))
    if error["type"] == "extra_forbidden":
        return f"{path}: {function} has no such parameter"
    return f"{path}: {error['msg']}"
