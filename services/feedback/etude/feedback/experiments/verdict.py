"""Verdicts on a candidate from what its users and those of the stable checkpoint did.

Promotion is a group-sequential test of the primary metric, guardrails and signals are mSPRTs. The
reasons are in docs/concepts/experiments.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import JsonValue

from etude.feedback.experiments.msprt import sequence_margin
from etude.feedback.experiments.spending import MIN_STEP, boundaries
from etude.feedback.experiments.user_moments import Difference, UserMoments, compare_arms

SPLIT_ALPHA = 0.001
"""Largest chance that an even split is ever refused, over all looks of an experiment."""
MAX_SHARE_IN_BOTH = 0.01
"""Of users seen in both arms; they are left out of both."""
_PRIOR = 50.0
"""Both parameters of the beta distribution of the share of control users if the split is not even:
0.5 with a standard deviation of 0.05."""


def find_invalidity(control_users: int, treatment_users: int, users_in_both: int) -> str | None:
    """Say why the arms cannot be compared, or return None.

    The first two count users seen in one arm alone.
    """
    total = control_users + treatment_users + users_in_both
    if users_in_both > MAX_SHARE_IN_BOTH * total:
        return f"{users_in_both:,} of {total:,} users were served both arms"
    p = split_p_value(control_users, treatment_users)
    if p < SPLIT_ALPHA:
        split = f"{control_users:,} and {treatment_users:,} users"
        return f"the arms have {split}, which an even split ever reaches with p = {p:.1g}"
    return None


def split_p_value(control_users: int, treatment_users: int) -> float:
    """Bound of the chance that users who are split evenly ever have a split as uneven.

    Test of sample-ratio mismatch that may be looked at after every user: Lindon and Malek,
    "Anytime-Valid Inference for Multinomial Count Data" (NeurIPS 2022, arXiv:2011.03567), with two
    arms. With m and n users, N = m + n, and B the beta function,

        E = 2^N B(a + m, a + n) / B(a, a)

    is the Bayes factor of a share drawn from Beta(a, a) against 1/2: a martingale with mean 1 while
    users are split evenly, so that it ever reaches 1/alpha with a probability of at most alpha
    (Ville). The bound is 1/E, at most 1.
    """
    users = control_users + treatment_users
    log_evidence = (
        users * math.log(2)
        + _log_beta(_PRIOR + control_users, _PRIOR + treatment_users)
        - _log_beta(_PRIOR, _PRIOR)
    )
    return math.exp(min(0.0, -log_evidence))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


POINTS = "points"
MAX_SUBSTITUTED = 0.05
"""Share of the rollouts of the treatment that another version may serve. The arms are compared as
users were assigned, so that what another version served pulls both differences and harm to 0."""


class CanaryAction(StrEnum):
    """Consequence of a look at a canary."""

    PROMOTE = "Promote"
    """The candidate is better by the primary metric."""
    ROLLBACK = "Rollback"
    """A guardrail or the primary metric is worse."""
    PAUSE = "Pause"
    """A signal is worse: a person decides."""
    CONTINUE = "Continue"
    NOT_ENOUGH_DATA = "NotEnoughData"
    """Too few users so far, or all planned users without a difference that shows."""
    INVALID = "Invalid"
    """The arms cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryMetric:
    """One metric of a canary, a ratio of two totals over users."""

    name: str
    """As sentences have it, such as `error rate`."""
    relevant: float
    """Smallest absolute difference that matters: τ of the mSPRT."""
    is_higher_better: bool = True
    unit: str = POINTS
    """Of differences; for points a share is multiplied by 100."""

    def __post_init__(self) -> None:
        if not 0 < self.relevant < math.inf:
            raise ValueError(f"{self.name}: relevant must be above 0, is {self.relevant}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPlan:
    """Rules of the decision about a candidate, fixed before the first user is assigned."""

    primary: CanaryMetric
    guardrails: tuple[CanaryMetric, ...] = ()
    """Roll back where they are worse."""
    signals: tuple[CanaryMetric, ...] = ()
    """Ask a person where they are worse."""
    users_per_arm: int
    """Planned users, at which the information fraction of the primary metric is 1."""
    alpha: float = 0.05
    """Two-sided, of the primary metric over all looks."""
    guardrail_alpha: float = 0.005
    """One-sided, of each guardrail and signal over all looks."""
    min_users: int = 200
    """Of each arm, below which a metric decides nothing: its mean is not yet normal."""

    def __post_init__(self) -> None:
        if not 2 <= self.min_users <= self.users_per_arm:
            raise ValueError(f"min_users must be from 2 to users_per_arm, is {self.min_users}")
        if not (0 < self.alpha < 1 and 0 < self.guardrail_alpha < 0.5):
            raise ValueError("alpha must be below 1 and guardrail_alpha below 0.5, both above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryData:
    """Figures at one look. Users of both arms are in neither."""

    control_users: int
    treatment_users: int
    users_in_both: int = 0
    treatment_rollouts: int = 0
    substituted_rollouts: int = 0
    """Those of the treatment that the candidate did not serve alone."""
    moments: Mapping[str, tuple[UserMoments, UserMoments]]
    """By metric, of control and treatment: users whose outcome is known by now."""
    looks: tuple[float, ...] = ()
    """Information fractions of earlier looks, from the last verdict."""
    is_final: bool = False
    """No more data will come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryVerdict:
    """An action, the sentence that says why, and the figures behind it."""

    action: CanaryAction
    sentence: str
    looks: tuple[float, ...]
    """Information fractions of the looks so far, for the next one."""
    evidence: Mapping[str, JsonValue]
    """The users of each arm, and each metric that was looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """One metric at one look."""

    metric: CanaryMetric
    difference: Difference
    users: int
    """Of both arms."""
    margin: float
    """Half the width of the interval of the difference; infinite where a look cannot decide."""
    confidence_percent: float

    @property
    def gain(self) -> float:
        """The difference, positive where the candidate is better."""
        return float(self.difference.value) * (1 if self.metric.is_higher_better else -1)

    @property
    def is_better(self) -> bool:
        return self.gain > self.margin

    @property
    def is_worse(self) -> bool:
        return self.gain < -self.margin

    def sentence(self) -> str:
        in_points = self.metric.unit == POINTS
        scale, digits = (100, ".1f") if in_points else (1, ".3g")
        value, margin = float(self.difference.value) * scale, self.margin * scale
        parts = [f"{self.metric.name} {value:+{digits}} {self.metric.unit}"]
        if math.isfinite(margin):
            interval = f"[{value - margin:{digits}}, {value + margin:{digits}}]"
            parts.append(f"{self.confidence_percent:.4g} % interval {interval}")
        return ", ".join([*parts, f"{self.users:,} users"])

    def evidence(self) -> dict[str, JsonValue]:
        return {
            "metric": self.metric.name,
            "control": float(self.difference.control),
            "treatment": float(self.difference.treatment),
            "difference": float(self.difference.value),
            "standardError": math.sqrt(float(self.difference.variance)),
            "margin": self.margin if math.isfinite(self.margin) else None,
            "confidencePercent": self.confidence_percent,
            "users": self.users,
        }


def decide_canary(plan: CanaryPlan, data: CanaryData) -> CanaryVerdict:
    """Decide about a candidate. Guardrails come before signals, both before the primary metric."""
    reason = find_invalidity(data.control_users, data.treatment_users, data.users_in_both)
    if reason is not None:
        return _verdict(CanaryAction.INVALID, f"invalid: {reason}", data, [])
    guardrails = _read_sequences(plan, plan.guardrails, data)
    signals = _read_sequences(plan, plan.signals, data)
    readings = [*guardrails, *signals]
    for reading in guardrails:
        if reading.is_worse:
            sentence = f"rolled back: {reading.sentence()}"
            return _verdict(CanaryAction.ROLLBACK, sentence, data, readings)
    for reading in signals:
        if reading.is_worse:
            sentence = f"paused for a person: {reading.sentence()}"
            return _verdict(CanaryAction.PAUSE, sentence, data, readings)
    lack = _find_lack(plan, data)
    if lack:
        return _verdict(CanaryAction.NOT_ENOUGH_DATA, f"not enough data: {lack}", data, readings)
    return _look_at_primary(plan, data, readings)


def _find_lack(plan: CanaryPlan, data: CanaryData) -> str:
    """Say which data is missing for a promotion; empty if none is."""
    if data.substituted_rollouts > MAX_SUBSTITUTED * data.treatment_rollouts:
        served = f"{data.substituted_rollouts:,} of {data.treatment_rollouts:,} rollouts"
        return f"another version served {served} of the candidate's users"
    for metric in (plan.primary, *plan.guardrails):
        num_users = users_per_arm(metric, data)
        if num_users < plan.min_users:
            users = f"{num_users:,} of the {plan.min_users:,} users an arm"
            return f"{metric.name} has {users} below which nothing is decided"
    return ""


def _look_at_primary(
    plan: CanaryPlan, data: CanaryData, readings: Sequence[_Reading]
) -> CanaryVerdict:
    """Spend alpha on the primary metric, if there is more information than at the last look."""
    control, treatment = data.moments[plan.primary.name]
    difference = compare_arms(control, treatment)
    pairs = 2 / (1 / float(control.users) + 1 / float(treatment.users))
    fraction, limit, looks = pairs / plan.users_per_arm, math.inf, data.looks
    if fraction - max(looks, default=0.0) >= MIN_STEP:
        looks = (*looks, fraction)
        limit = boundaries(looks, plan.alpha, is_final=data.is_final)[-1]
    reading = _Reading(
        metric=plan.primary,
        difference=difference,
        users=int(control.users + treatment.users),
        margin=limit * math.sqrt(float(difference.variance)) if limit < math.inf else limit,
        confidence_percent=100 * (1 - plan.alpha),
    )
    if reading.is_better:
        action, text = CanaryAction.PROMOTE, f"promoted: {reading.sentence()}"
    elif reading.is_worse:
        action, text = CanaryAction.ROLLBACK, f"rolled back: {reading.sentence()}"
    elif data.is_final or fraction >= 1:
        action = CanaryAction.NOT_ENOUGH_DATA
        text = f"not enough data: {reading.sentence()}, and no more are planned"
    else:
        action = CanaryAction.CONTINUE
        text = f"continues: {reading.sentence()}, {100 * fraction:.0f} % of those planned"
    return _verdict(action, text, data, [reading, *readings], looks)


def _read_sequences(
    plan: CanaryPlan, metrics: Sequence[CanaryMetric], data: CanaryData
) -> list[_Reading]:
    """Metrics that may be looked at for ever, of those with enough users."""
    readings = []
    for metric in metrics:
        if users_per_arm(metric, data) >= plan.min_users:
            control, treatment = data.moments[metric.name]
            difference = compare_arms(control, treatment)
            alpha = 2 * plan.guardrail_alpha
            reading = _Reading(
                metric=metric,
                difference=difference,
                users=int(control.users + treatment.users),
                margin=float(sequence_margin(difference, metric.relevant, alpha)),
                confidence_percent=100 * (1 - alpha),
            )
            readings.append(reading)
    return readings


def users_per_arm(metric: CanaryMetric, data: CanaryData) -> int:
    """Users of the smaller arm; 0 while an arm has no event."""
    arms = data.moments.get(metric.name, ())
    if not arms or any(arm.sums[1] <= 0 for arm in arms):
        return 0
    return int(min(arm.users for arm in arms))


def _verdict(
    action: CanaryAction,
    sentence: str,
    data: CanaryData,
    readings: Sequence[_Reading],
    looks: tuple[float, ...] | None = None,
) -> CanaryVerdict:
    return CanaryVerdict(
        action=action,
        sentence=sentence,
        looks=data.looks if looks is None else looks,
        evidence={
            "controlUsers": data.control_users,
            "treatmentUsers": data.treatment_users,
            "usersInBoth": data.users_in_both,
            "treatmentRollouts": data.treatment_rollouts,
            "substitutedRollouts": data.substituted_rollouts,
            "metrics": [reading.evidence() for reading in readings],
        },
    )
