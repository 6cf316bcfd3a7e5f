"""Rubric: the weighted set of reward functions, and the reward of one rollout."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from blake3 import blake3

from etude.common.api.meta import number
from etude.common.api.run.rewards import (
    BrokenCallsParameters,
    LengthPenaltyParameters,
    Parameters,
    UnfinishedParameters,
    VerifierParameters,
    check_function,
)
from etude.common.api.run.roles import RewardFunction
from etude.common.errors import Problem, UserError
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions import broken_calls, length_penalty, unfinished, verifier
from etude.v1 import rollout_pb2

LARGEST_REWARD = 1e6

VERSIONS = {
    "Verifier": verifier.VERSION,
    "LengthPenalty": length_penalty.VERSION,
    "BrokenCalls": broken_calls.VERSION,
    "Unfinished": unfinished.VERSION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RubricEntry:
    """One configured reward function."""

    name: str
    function: str
    weight: float
    parameters: Parameters
    limit_s: int
    """Limit of one evaluation; only the verifier's takes time."""

    @property
    def version(self) -> str:
        """Changes whenever the same rollout could get another value."""
        return VERSIONS[self.function]

    def parameters_json(self) -> str:
        """The parameters, defaults included."""
        return json.dumps(self.parameters.to_json(), sort_keys=True)


class RewardPart(NamedTuple):
    """One function's part of a reward: penalties are negative; the reward is Σ weight · value."""

    name: str
    value: float
    weight: float


class RewardValue(NamedTuple):
    """The reward of one rollout and its parts."""

    reward: float
    success: float
    parts: tuple[RewardPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """R = weight · verifier, less the sum of weight · penalty."""

    entries: tuple[RubricEntry, ...]

    @classmethod
    def from_functions(cls, functions: Sequence[RewardFunction]) -> Self:
        """The rubric of a run.

        Raises:
            UserError: a function's parameters are wrong, or there is not exactly one verifier.
        """
        entries = tuple(_entry(index, function) for index, function in enumerate(functions))
        if sum(entry.function == "Verifier" for entry in entries) != 1:
            raise UserError(_problem("", "exactly one entry must have function Verifier"))
        return cls(entries=entries)

    @property
    def verifier(self) -> RubricEntry:
        """The entry that runs the hidden tests."""
        return next(entry for entry in self.entries if entry.function == "Verifier")

    def digest(self) -> str:
        """Identity of functions, versions, weights and parameters."""
        rows = [
            (e.name, e.function, e.version, e.weight, e.parameters_json()) for e in self.entries
        ]
        return blake3(json.dumps(rows).encode()).hexdigest()

    def score(self, rollout: rollout_pb2.Rollout, success: float) -> RewardValue | Fault:
        """The reward of a rollout whose hidden tests gave this success. Pure."""
        parts = tuple(
            RewardPart(entry.name, _value(entry, rollout, success), entry.weight)
            for entry in self.entries
        )
        reward = math.fsum(part.weight * part.value for part in parts)
        if not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
            return Fault(FaultReason.GRADER_ERROR, f"the rubric gives {reward}")
        return RewardValue(reward, success, parts)


def _value(entry: RubricEntry, rollout: rollout_pb2.Rollout, success: float) -> float:
    match entry.parameters:
        case LengthPenaltyParameters() as parameters:
            return -length_penalty.penalty(rollout, parameters, success=success)
        case BrokenCallsParameters():
            return -broken_calls.penalty(rollout)
        case UnfinishedParameters():
            return -unfinished.penalty(rollout)
        case VerifierParameters():
            return success


def _entry(index: int, function: RewardFunction) -> RubricEntry:
    try:
        parameters = check_function(function.function, function.parameters)
    except ValueError as cause:
        raise UserError(_problem(f"[{index}]", str(cause))) from cause
    return RubricEntry(
        name=function.name,
        function=function.function,
        weight=number(function.weight),
        parameters=parameters,
        limit_s=function.limit_s,
    )


def _problem(where: str, what: str) -> Problem:
    return Problem(
        reason="InvalidSpec",
        what=what,
        where=f"spec.roles.rewards.functions{where}",
        fix="see the rewards reference, and check the manifest with `etude lint`",
    )
