"""Rules by which a candidate reaches users: evaluation gate, canary, policy."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from etude.common.api.evaluation.spec import METRIC_NAMES, EvaluationPlan
from etude.common.api.meta import NAMED, Fraction, Model, Name, Rule, UniqueBy

LABEL = r"^[A-Za-z][A-Za-z0-9 _-]*$"
Label = Annotated[str, Field(min_length=1, max_length=64, pattern=LABEL)]


class RoutePolicy(StrEnum):
    """Decisions that need no person."""

    AUTOMATIC = "Automatic"
    MANUAL = "Manual"
    FROZEN = "Frozen"


def _above_zero(field: str) -> Rule:
    name = "".join(word.capitalize() if i else word for i, word in enumerate(field.split("_")))
    return Rule(
        cel=f"double(self.{name}) > 0.0",
        holds=lambda s: float(getattr(s, field)) > 0,
        message=f"{name} must be above 0",
        fix='give a decimal such as "0.02"',
        field_path=f".{name}",
    )


class RouteMargin(Model):
    """Largest loss in one metric of the evaluation."""

    rules: ClassVar[tuple[Rule, ...]] = (_above_zero("margin"),)

    metric: Label
    """Metric of the evaluation, such as success."""
    margin: Fraction
    """Loss that is accepted, in the metric's own unit."""
    is_share: bool = True
    """True for values from 0 to 1."""
    less_is_better: bool = False
    """True if the candidate should have less of it."""


MAX_GATE_SUITES = 4
MAX_GATE_MARGINS = 2
"""Of a gate with an evaluation: its figures fit what a pod hands over as it ends."""
GATE_METRICS = {row: metric for metric, row in METRIC_NAMES.items()}
"""Metrics of an EvalRun's comparison, by their names in the margins of a gate."""


def _measured(margins: Sequence[RouteMargin]) -> bool:
    return len(margins) <= MAX_GATE_MARGINS and all(m.metric in GATE_METRICS for m in margins)


class RouteGate(Model):
    """Rules of the evaluation gate: candidate against the version in use, paired by task."""

    rules: ClassVar[tuple[Rule, ...]] = (
        _above_zero("attack_level"),
        Rule(
            cel=f"!has(self.evaluation) || self.evaluation.suites.size() <= {MAX_GATE_SUITES}",
            holds=lambda s: s.evaluation is None or len(s.evaluation.suites) <= MAX_GATE_SUITES,
            message=f"evaluation has more than {MAX_GATE_SUITES} suites",
            fix="join suites into one folder of tasks",
            field_path=".evaluation",
        ),
        Rule(
            cel="!has(self.evaluation) || !has(self.margins)"
            f" || (self.margins.size() <= {MAX_GATE_MARGINS}"
            f" && self.margins.all(m, m.metric in {json.dumps(list(GATE_METRICS))}))",
            holds=lambda s: s.evaluation is None or s.margins is None or _measured(s.margins),
            message=f"with an evaluation, at most {MAX_GATE_MARGINS} margins, and metric one of"
            f" {', '.join(GATE_METRICS)}",
            fix="remove margins, or leave out evaluation and propose by hand",
            field_path=".margins",
        ),
        Rule(
            cel="!has(self.evaluation)"
            " || !has(self.gainSuites)"
            " || self.gainSuites.all(g, self.evaluation.suites.exists(s, s.name == g))",
            holds=lambda s: (
                s.evaluation is None
                or set(s.gain_suites) <= {suite.name for suite in s.evaluation.suites}
            ),
            message="each of gainSuites must be the name of one of evaluation.suites",
            fix="add the suite, or correct the name: what is not measured lets nothing pass",
            field_path=".gainSuites",
        ),
    )

    evaluation: EvaluationPlan | None = None
    """Evaluation of each new checkpoint of the run that a Feedback window, a phase's end or a
    person made, against the version in use: with policy Automatic the operator makes its EvalRuns
    and proposes the result. People propose where it is not set."""
    margins: (
        Annotated[tuple[RouteMargin, ...], Field(min_length=1, max_length=64), UniqueBy("metric")]
        | None
    ) = None
    """Of each metric the lower bound of the difference must be above minus its margin; unless set,
    success with a margin of 0.02. With an evaluation each must hold in every suite."""
    gain_suites: Annotated[tuple[Name, ...], Field(max_length=MAX_GATE_SUITES)] = ()
    """Suites in which success must be better: the lower bound of its difference above 0, whatever
    its margin is. Those of a tenant's branch are the tenant's own; in all others it may lose the
    margin."""
    attack_level: Fraction = "0.1"
    """Highest share of attacks that may succeed, of each suite with attacks: the upper 95 % bound
    must be below it. 30 tasks without a success prove 0.1."""
    min_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Tasks of both versions, below which nothing is decided."""


class RouteMetric(Model):
    """One metric of users: a signal, summed over the rollouts of each user."""

    rules: ClassVar[tuple[Rule, ...]] = (_above_zero("relevant"),)

    name: Label
    """As sentences have it."""
    signal: Label
    """Signal of feedback, such as persistence."""
    relevant: Fraction
    """Smallest absolute difference that matters."""
    is_higher_better: bool = True
    """False for metrics such as complaints."""
    unit: Annotated[str, Field(min_length=1, max_length=16)] = "points"
    """Of differences; for points a share is multiplied by 100."""


class RouteCanary(Model):
    """Rules of the comparison with users."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.steps.all(i, self.steps.exists_one(j, j == i)) && self.steps.isSorted()",
            holds=lambda s: list(s.steps) == sorted(set(s.steps)),
            message="steps: each must be above the one before",
            fix="write rising shares, such as [100, 500, 1000]",
            field_path=".steps",
        ),
        Rule(
            cel="self.minUsers <= self.usersPerArm",
            holds=lambda s: s.min_users <= s.users_per_arm,
            message="minUsers must not be above usersPerArm",
            fix="lower minUsers, or plan for more users",
            field_path=".minUsers",
        ),
    )

    steps: Annotated[
        tuple[Annotated[int, Field(ge=1, le=5_000)], ...], Field(min_length=1, max_length=16)
    ] = (100, 500, 1_000, 2_500, 5_000)
    """Shares of users with the candidate, in 10,000ths of all; as many are the control."""
    step_seconds: Annotated[int, Field(ge=0, le=2_592_000)] = 900
    """Shortest time of a step."""
    max_seconds: Annotated[int, Field(ge=0, le=2_592_000)] = 604_800
    """Longest time of a canary: then its last look decides."""
    users_per_arm: Annotated[int, Field(ge=2, le=100_000_000)] = 20_000
    """Planned users of each arm whose outcome is known."""
    min_users: Annotated[int, Field(ge=2, le=1_000_000)] = 200
    """Of each arm, below which a metric decides nothing and a step does not end."""
    primary: RouteMetric | None = None
    """Promotes the candidate if it is better; unless set, the persistence of edits."""
    guardrails: Annotated[tuple[RouteMetric, ...], Field(max_length=16), NAMED] | None = None
    """Roll back if they are worse; broken tool calls and latency unless set."""
    signals: Annotated[tuple[RouteMetric, ...], Field(max_length=16), NAMED] | None = None
    """Ask a person if they are worse; complaints unless set. All metrics have different names."""
