"""Kinds of reward functions: formulas over a rollout's record, and measurements that take time."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.common.api.meta import Model
from etude.common.api.run.rewards import JudgeParameters
from etude.rewards.faults import Fault
from etude.v1 import rollout_pb2

AskJudge = Callable[[JudgeParameters, str, rollout_pb2.Rollout], Awaitable[float | Fault]]
"""Score of a rollout from 0 to 1 by a model, from its parameters, the instruction, the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One entry of the registry: a penalty, or a value that the rubric itself gives."""

    version: str
    """Changes whenever the same rollout could get another value; it is part of every record."""
    parameters: type[Model]
    """Model of `parameters` in a manifest; an unknown key is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty(RewardFunction):
    """A pure formula over the record of a rollout.

    Its value is not negative, and up to 1 unless the function's reference says otherwise: the
    rubric subtracts weight x penalty.
    """

    # Any: each function takes its own parameters model, of which the registry holds many.
    penalty: Callable[[rollout_pb2.Rollout, Any, float], float]
    """Arguments: the record, the parameters, the share of passed hidden tests from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """A rollout whose hidden tests ran, with its record and what a measurement may need."""

    record: rollout_pb2.Rollout
    success: float
    """From 0 to 1."""
    instruction: str
    """Of the task."""
    originals: Mapping[str, bytes]
    """Files of the task's folder environment/ by path; empty unless the function reads them."""
    has_image: bool
    """True if the workspace may have had other files at first."""
    ask_judge: AskJudge
    siblings: Sequence[rollout_pb2.Rollout] = ()
    """Rollouts of the group, this one among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPenalty(RewardFunction):
    """A penalty for which something runs: a linter, a model, a service.

    A measurement that does not end by the deadline of its group masks the rollout, as a Fault does:
    it must not be one that a policy can provoke.
    """

    measure: Callable[[FinishedRollout, Any], Awaitable[float | Fault]]
    reads_originals: bool = False
    """True if `FinishedRollout.originals` is read."""
