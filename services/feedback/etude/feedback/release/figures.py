"""Figures of a canary: sums over the users of both arms, from outcomes of their rollouts; pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from etude.common.experiments.assignment import Arm
from etude.common.weights import VersionId
from etude.feedback.experiments.user_moments import UserMoments, fill_histories
from etude.feedback.experiments.verdict import CanaryData
from etude.feedback.release.rules import UserMetric
from etude.feedback.signals.outcome import RolloutOutcome, SignalState

User = tuple[str, str]
"""Tenant and pseudonym."""


class _Ratio(NamedTuple):
    """Sums of one signal over rollouts of a user."""

    numerator: float = 0.0
    denominator: float = 0.0


_Sums = defaultdict[str, dict[User, _Ratio]]
"""By signal and user."""


@dataclass(slots=True)
class _ArmSums:
    """Users of one arm."""

    users: set[User] = field(default_factory=set)
    policies: Counter[VersionId | None] = field(default_factory=Counter)
    """Rollouts by the version that served them; None where there were several."""
    sums: _Sums = field(default_factory=lambda: defaultdict(dict))


def summarise_arms(
    outcomes: Iterable[RolloutOutcome],
    metrics: Sequence[UserMetric],
    *,
    experiment: str,
    candidate: VersionId,
    started_ms: int,
) -> CanaryData:
    """Sum up the users of an experiment.

    Rollouts of the experiment count for its arms, once a signal waits for nothing. Earlier ones of
    the same users are their histories (CUPED); no later one of another experiment counts.

    Args:
        outcomes: of any rollouts.
        metrics: of the canary.
        experiment: its name.
        candidate: version that the treatment is to have.
        started_ms: its start.
    """
    arms = {arm.value: _ArmSums() for arm in (Arm.CONTROL, Arm.TREATMENT)}
    earlier: _Sums = defaultdict(dict)
    for outcome in outcomes:
        if outcome.experiment == experiment and outcome.arm in arms:
            arms[outcome.arm].users.add((outcome.tenant, outcome.user))
            arms[outcome.arm].policies[outcome.policy] += 1
            _add(arms[outcome.arm].sums, outcome)
        elif outcome.experiment != experiment and outcome.started_ms < started_ms:
            _add(earlier, outcome)
    control, treatment = arms.values()
    in_both = control.users & treatment.users
    moments = {
        metric.name: pair
        for metric in metrics
        if (pair := _compare(metric.signal, control, treatment, in_both, earlier)) is not None
    }
    return CanaryData(
        control_users=len(control.users - in_both),
        treatment_users=len(treatment.users - in_both),
        users_in_both=len(in_both),
        treatment_rollouts=treatment.policies.total(),
        substituted_rollouts=treatment.policies.total() - treatment.policies[candidate],
        moments=moments,
    )


def _add(sums: _Sums, outcome: RolloutOutcome) -> None:
    user = (outcome.tenant, outcome.user)
    for signal, value in outcome.values.items():
        if value.state is not SignalState.WAITING and value.denominator > 0:
            known = sums[signal].get(user, _Ratio())
            sums[signal][user] = _Ratio(
                known.numerator + value.numerator, known.denominator + value.denominator
            )


def _compare(
    signal: str, control: _ArmSums, treatment: _ArmSums, in_both: set[User], earlier: _Sums
) -> tuple[UserMoments, UserMoments] | None:
    """Moments of one signal; None while an arm has no user with a value."""
    arms = [
        {user: ratio for user, ratio in arm.sums[signal].items() if user not in in_both}
        for arm in (control, treatment)
    ]
    if not all(arms):
        return None
    histories = fill_histories(*(_past_values(arm, earlier[signal]) for arm in arms))
    first, second = (
        UserMoments.from_users(
            [ratio.numerator for ratio in arm.values()],
            [ratio.denominator for ratio in arm.values()],
            history,
        )
        for arm, history in zip(arms, histories, strict=True)
    )
    return first, second


def _past_values(arm: Mapping[User, _Ratio], earlier: Mapping[User, _Ratio]) -> list[float]:
    """The metric of each user from before the experiment; NaN where there is none."""
    ratios = [earlier.get(user) for user in arm]
    return [each.numerator / each.denominator if each else np.nan for each in ratios]
