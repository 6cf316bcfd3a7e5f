"""Rules of a route's releases: gate, canary, metrics and policy, as its owner sets them."""

import json
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from etude.common.api.evaluation.spec import ATTACKS
from etude.common.api.meta import Model
from etude.common.errors import Problem, UserError
from etude.common.evaluation.gate import MarginRule
from etude.common.experiments.assignment import MAX_SHARE
from etude.common.release.proposal import suite_metric
from etude.feedback.experiments.verdict import POINTS, CanaryMetric, CanaryPlan
from etude.feedback.signals.registry import signal_versions

DEFAULT_STEPS = (100, 500, 1_000, 2_500, 5_000)
"""1, 5, 10, 25 and 50 % of all users."""
Label = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9 _-]*$")]
GateMetric = Annotated[
    str, Field(min_length=1, max_length=96, pattern=r"^[A-Za-z][A-Za-z0-9 _-]*$")
]
"""A metric of the evaluation, of one suite or of all."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[int, Field(ge=1, le=MAX_SHARE)]
Seconds = Annotated[int, Field(ge=0, le=30 * 86_400)]


class ReleasePolicy(StrEnum):
    """Decisions that need no person."""

    AUTOMATIC = "Automatic"
    """All of them."""
    MANUAL = "Manual"
    """All but promotion."""
    FROZEN = "Frozen"
    """Roll-back alone."""


class GateMargin(Model):
    """Largest loss in one metric of the evaluation."""

    metric: GateMetric
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """0 asks for a gain."""
    is_share: bool = True
    """True for values from 0 to 1."""
    less_is_better: bool = False

    def to_rule(self, name: str) -> MarginRule:
        """The rule about a metric of one suite."""
        return MarginRule(**self.model_dump() | {"metric": name})


class GateRules(Model):
    """Rules of the evaluation gate."""

    margins: Annotated[tuple[GateMargin, ...], Field(min_length=1, max_length=64)] = (
        GateMargin(metric="success", margin=0.02),
    )
    min_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Tasks of both versions, below which nothing is decided."""
    suites: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    """Suites in which every margin must hold; unless set, those that were measured."""
    attack_suites: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    """Suites of attacks that have to be measured; unless set, those that were."""
    attack_level: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Highest share of attacks that may succeed, for the upper bound of each suite."""
    gain_suites: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    """Suites in which success must be better, whatever its margin is."""

    def to_rules(self, measured: Collection[str]) -> list[MarginRule]:
        """Rules about the given metrics of an evaluation, or about those that it lacks."""
        gains = [suite_metric("success", suite) for suite in self.gain_suites]
        attacks = [suite_metric(ATTACKS, suite) for suite in self.attack_suites]
        if not attacks:
            attacks = sorted(m for m in measured if m.startswith(suite_metric(ATTACKS, "")))
        return [
            *(MarginRule(metric=name, margin=0) for name in gains),
            *(
                margin.to_rule(name)
                for margin in self.margins
                for name in self._find_names(margin.metric, measured)
                if name not in gains
            ),
            *(
                MarginRule(
                    metric=name, margin=self.attack_level, less_is_better=True, is_level=True
                )
                for name in attacks
            ),
        ]

    def _find_names(self, metric: str, measured: Collection[str]) -> list[str]:
        if self.suites:
            return [suite_metric(metric, suite) for suite in self.suites]
        of_suites = suite_metric(metric, "")
        return sorted(m for m in measured if m == metric or m.startswith(of_suites)) or [metric]


class UserMetric(Model):
    """One metric of users: a signal, summed over the rollouts of each user."""

    name: Label
    """As sentences have it."""
    signal: Label
    relevant: Positive
    """Smallest absolute difference that matters."""
    is_higher_better: bool = True
    unit: Annotated[str, Field(min_length=1, max_length=16)] = POINTS
    """Of differences; for points a share is multiplied by 100."""

    @field_validator("signal")
    @classmethod
    def _check_signal(cls, signal: str) -> str:
        """Refuse a signal that nothing measures.

        Raises:
            ValueError: naming those that are.
        """
        if signal not in signal_versions():
            raise ValueError(f"{signal!r} is not one of {', '.join(sorted(signal_versions()))}")
        return signal

    def to_metric(self) -> CanaryMetric:
        return CanaryMetric(
            name=self.name,
            relevant=self.relevant,
            is_higher_better=self.is_higher_better,
            unit=self.unit,
        )


EDITS = UserMetric(name="edit persistence", signal="edit_persistence", relevant=0.0137)
BROKEN_CALLS = UserMetric(
    name="broken tool calls", signal="broken_tool_call", relevant=0.01, is_higher_better=False
)
LATENCY = UserMetric(
    name="latency", signal="latency", relevant=0.1, is_higher_better=False, unit="log"
)
COMPLAINTS = UserMetric(
    name="complaints", signal="dissatisfied_followup", relevant=0.02, is_higher_better=False
)


class CanaryRules(Model):
    """Rules of the comparison with users."""

    steps: Annotated[tuple[Share, ...], Field(min_length=1, max_length=16)] = DEFAULT_STEPS
    """Shares of users with the candidate, in 10,000ths of all; as many are the control."""
    step_seconds: Seconds = 900
    """Shortest time of a step."""
    max_seconds: Seconds = 7 * 86_400
    """Longest time of a canary: then its last look decides."""
    users_per_arm: Annotated[int, Field(ge=2, le=100_000_000)] = 20_000
    """Planned users of each arm whose outcome is known."""
    min_users: Annotated[int, Field(ge=2, le=1_000_000)] = 200
    """Of each arm, below which a metric decides nothing and a step does not end."""
    primary: UserMetric = EDITS
    """Promotes the candidate if it is better."""
    guardrails: Annotated[tuple[UserMetric, ...], Field(max_length=16)] = (BROKEN_CALLS, LATENCY)
    """Roll back if they are worse."""
    signals: Annotated[tuple[UserMetric, ...], Field(max_length=16)] = (COMPLAINTS,)
    """Ask a person if they are worse."""

    @property
    def metrics(self) -> tuple[UserMetric, ...]:
        return (self.primary, *self.guardrails, *self.signals)

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse steps that do not rise, metrics with one name, and too few users.

        Raises:
            ValueError: naming the field.
        """
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError("steps: each must be above the one before")
        names = [metric.name for metric in self.metrics]
        if len(set(names)) < len(names):
            raise ValueError("primary, guardrails, signals: two metrics have one name")
        if self.min_users > self.users_per_arm:
            raise ValueError("minUsers: is above usersPerArm")
        return self

    def to_plan(self) -> CanaryPlan:
        return CanaryPlan(
            primary=self.primary.to_metric(),
            guardrails=tuple(each.to_metric() for each in self.guardrails),
            signals=tuple(each.to_metric() for each in self.signals),
            users_per_arm=self.users_per_arm,
            min_users=self.min_users,
        )


class ReleaseRules(Model):
    """All rules of a route."""

    policy: ReleasePolicy = ReleasePolicy.AUTOMATIC
    interval_seconds: Annotated[int, Field(ge=1, le=3_600)] = 60
    """Between two looks at a canary."""
    gate: GateRules = GateRules()
    canary: CanaryRules = CanaryRules()


class ReleaseSettings(NamedTuple):
    """Settings of the releases of a service."""

    rules_file: Path
    """JSON of the rules."""
    host: str
    port: int
    """Of requests."""
    horizon_s: float
    """Time after a rollout's last turn in which its signals come."""
    trusts_network: bool = False
    """Take a caller without certificate and key for the operator: the network lets nobody else
    through."""


def read_rules(path: Path) -> ReleaseRules:
    """Read the rules of a file.

    Raises:
        UserError: the file is missing or has no valid rules.
    """
    try:
        return ReleaseRules.parse_known_fields(json.loads(path.read_bytes()))
    except (OSError, ValueError) as cause:
        what = f"cannot be read as rules of releases: {cause}"
        fix = "correct the field that it names; {} has all defaults"
        raise UserError(Problem("InvalidSpec", what, str(path), fix)) from cause
