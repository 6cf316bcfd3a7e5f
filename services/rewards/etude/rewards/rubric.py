"""Rubric: the weighted set of reward functions, and the reward of one rollout."""

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple, Self

from blake3 import blake3

from etude.common.api.meta import Model, number
from etude.common.api.run.rewards import check_function
from etude.common.api.run.roles import RewardFunction as ConfiguredFunction
from etude.common.errors import Problem, UserError
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions import deferral
from etude.rewards.functions.base import Penalty, RewardFunction
from etude.rewards.functions.registry import find_function
from etude.v1 import rollout_pb2

log = logging.getLogger(__name__)

LARGEST_REWARD = 1e6
_NO_PENALTIES = frozenset({"Verifier", "Deferral"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RubricEntry:
    """One configured reward function."""

    name: str
    function: str
    implementation: RewardFunction
    weight: float
    parameters: Model
    limit_s: int
    """Limit of one evaluation; only the verifier's takes time."""

    @property
    def version(self) -> str:
        """Changes whenever the same rollout could get another value."""
        return self.implementation.version

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
    def from_functions(cls, functions: Sequence[ConfiguredFunction]) -> Self:
        """The rubric of a run.

        Raises:
            UserError: a function's parameters are wrong, there is not exactly one verifier, or
                more than one deferral.
        """
        entries = tuple(_entry(index, function) for index, function in enumerate(functions))
        counts = Counter(entry.function for entry in entries)
        if counts["Verifier"] != 1:
            raise UserError(_problem("", "exactly one entry must have function Verifier"))
        if counts["Deferral"] > 1:
            raise UserError(_problem("", "at most one entry may have function Deferral"))
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

    def score(
        self,
        rollout: rollout_pb2.Rollout,
        success: float,
        measured: Mapping[str, float] = MappingProxyType({}),
    ) -> RewardValue | Fault:
        """The reward of a rollout alone, whose hidden tests gave this success. Pure.

        Args:
            rollout: the record.
            success: from 0 to 1.
            measured: penalties of the functions that run something, by the entry's name.
        """
        parts = []
        for entry in self.entries:
            try:
                value = _value(entry, rollout, success, measured)
            except Exception as error:  # a package's own mistake  # noqa: BLE001
                return broken_function(entry, error)
            parts.append(RewardPart(entry.name, value, entry.weight))
        reward = math.fsum(part.weight * part.value for part in parts)
        if not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
            return Fault(FaultReason.GRADER_ERROR, f"the rubric gives {reward}")
        return RewardValue(reward, success, tuple(parts))

    def settle_deferrals(
        self,
        rollouts: Sequence[rollout_pb2.Rollout],
        outcomes: Sequence[RewardValue | Fault],
        *,
        ambiguity: float,
    ) -> list[RewardValue | Fault]:
        """Rewards of one group in which each question gets its deferred reward. Pure.

        A question is worth the smaller of two means: of the siblings that changed something, and
        of all that do not ask. Siblings that gave up would otherwise make it pay. Without any such
        sibling it is worth the lowest reward of the rubric.

        Args:
            rollouts: siblings of one task. [G]
            outcomes: of each alone. [G]
            ambiguity: of the task's instruction, from 0 to 1.
        """
        entry = next((e for e in self.entries if e.function == "Deferral"), None)
        if entry is None or not any(map(deferral.is_deferred, rollouts)):
            return list(outcomes)
        pairs = list(zip(rollouts, outcomes, strict=True))
        others = [
            (outcome.reward, deferral.changes_files(rollout))
            for rollout, outcome in pairs
            if isinstance(outcome, RewardValue) and not deferral.is_deferred(rollout)
        ]
        edited = [reward for reward, has_changes in others if has_changes]
        means = [fmean(rewards) for rewards in (edited, [r for r, _ in others]) if rewards]
        worth = min(means, default=self._lowest_reward())
        value = deferral.deferred_reward(worth, cost=entry.weight, ambiguity=ambiguity)
        return [
            self._replace_success(outcome, entry, value)
            if isinstance(outcome, RewardValue) and deferral.is_deferred(rollout)
            else outcome
            for rollout, outcome in pairs
        ]

    def _lowest_reward(self) -> float:
        """Reward of a failure with each penalty at 1."""
        return -math.fsum(e.weight for e in self.entries if e.function not in _NO_PENALTIES)

    def _replace_success(
        self, outcome: RewardValue, entry: RubricEntry, value: float
    ) -> RewardValue:
        """The outcome with a value in place of weight x success; the entry's part makes the sum."""
        if not entry.weight:
            return outcome
        change = value - self.verifier.weight * outcome.success
        parts = tuple(
            part._replace(value=change / entry.weight) if part.name == entry.name else part
            for part in outcome.parts
        )
        return outcome._replace(reward=outcome.reward + change, parts=parts)


def _value(
    entry: RubricEntry,
    rollout: rollout_pb2.Rollout,
    success: float,
    measured: Mapping[str, float],
) -> float:
    if entry.function == "Verifier":
        return success
    if entry.function == "Deferral":
        return 0.0  # it depends on the siblings: see settle_deferrals
    penalty = (
        entry.implementation.penalty(rollout, entry.parameters, success)
        if isinstance(entry.implementation, Penalty)
        else measured[entry.name]
    )
    if not penalty >= 0:
        raise ValueError(f"{penalty} is no penalty: a number of at least 0")
    return -float(penalty)


def broken_function(entry: RubricEntry, error: Exception) -> Fault:
    """The fault that masks a rollout because one of the run's functions failed on it."""
    log.error("%s (%s) failed", entry.name, entry.function, exc_info=error)
    what = f"{entry.name} ({entry.function}): {type(error).__name__}: {error}"
    return Fault(FaultReason.GRADER_ERROR, what)


def _entry(index: int, function: ConfiguredFunction) -> RubricEntry:
    try:
        parameters = check_function(function.function, function.parameters)
        implementation = find_function(function.function)
    except ValueError as cause:
        raise UserError(_problem(f"[{index}]", str(cause))) from cause
    return RubricEntry(
        name=function.name,
        function=function.function,
        implementation=implementation,
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
