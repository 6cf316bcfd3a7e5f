"""Evasions: rollouts that avoid the work are never worth more than those that try it.

Users forgive a question and a broken call, and complain about work. A penalty that is fixed, or
scaled by how many evade, pays a policy to evade where work is hard.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from etude.common.feedback.windows import RolloutCounts
from etude.feedback.credit import FEWEST_USERS, MAX_ADVANTAGE, lowest_reward
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals import broken_tool_call, deferral
from etude.feedback.signals.outcome import RolloutOutcome

SCALE = 2.0
"""Smallest difference that a signal of 0 and 1 has once it is scaled by its spread."""
_SIGNALS = (broken_tool_call.SIGNAL.name, deferral.SIGNAL.name)


def find_evasions(
    outcomes: Sequence[RolloutOutcome],
    counts: Sequence[RolloutCounts],
    weights: Mapping[str, float],
) -> list[str]:
    """Signal of each rollout that avoids the work; empty for one that works.  [N], [N] -> [N].

    A signal without a negative weight finds none.
    """
    return [
        _find_evasion(outcome, each, weights)
        for outcome, each in zip(outcomes, counts, strict=True)
    ]


def _find_evasion(
    outcome: RolloutOutcome, counts: RolloutCounts, weights: Mapping[str, float]
) -> str:
    asked = outcome.values[deferral.SIGNAL.name]
    found = {
        # Not a share of its calls: a policy learns to read until one of many is broken.
        broken_tool_call.SIGNAL.name: counts.broken_calls > 0 and not counts.edits,
        deferral.SIGNAL.name: asked.denominator > 0 and asked.numerator > 0,
    }
    return next((name for name, is_so in found.items() if is_so and weights.get(name, 0.0) < 0), "")


def price_evasions(weights: Mapping[str, float]) -> float:
    """Difference between the work and an evasion of any kind, in scaled reward.

    It is twice the larger weight: the spread of what is true or false is at most 1/2, and so a
    scaled signal tells two rollouts apart by 2 or more.
    """
    return -SCALE * min(weights.get(name, 0.0) for name in _SIGNALS)


class _Means(NamedTuple):
    """Mean reward of each user, cut around their median, and the sum of them."""

    by_user: Mapping[UserId, float]
    total: float

    @property
    def mean(self) -> float:
        """Mean over all users."""
        return self.total / len(self.by_user)

    def without(self, user: UserId) -> float | None:
        """Mean over the other users; None if they are too few."""
        own = self.by_user.get(user)
        others = len(self.by_user) - (own is not None)
        return (self.total - (own or 0.0)) / others if others >= FEWEST_USERS - 1 else None


def lower_evasions(
    rewards: Sequence[float],
    users: Sequence[UserId],
    strata: Sequence[str],
    *,
    evasions: Sequence[str],
    has_edits: Sequence[bool],
    weights: Mapping[str, float],
) -> list[float]:
    """Rewards, with evasions worth less in the mean than the work by their price.  [N] -> [N].

    The worth of the work is the smaller of two means over the other users of a stratum: of rollouts
    that edit, and of all that do not evade. Evasions of each kind lose as much as their mean is
    above that worth less the price, or above another kind of enough users, and keep their
    differences: their mean advantage is never above 0, and a policy gains nothing by taking another
    kind. Where no rollout works, in the stratum or the window, all evasions get the lowest reward,
    and nothing is learned.

    Args:
        rewards: of signals. [N]
        users: their users. [N]
        strata: sets of rollouts that are compared. [N]
        evasions: signals of those that avoid the work; empty for others. [N]
        has_edits: rollouts that applied an edit. [N]
        weights: of the signals.
    """
    works = _mean_rewards(rewards, users, strata, [not kind for kind in evasions])
    edits = _mean_rewards(rewards, users, strata, has_edits)
    evading = {
        kind: _mean_rewards(rewards, users, strata, [each == kind for each in evasions])
        for kind in {*evasions} - {""}
    }
    lowest, price = lowest_reward(weights), price_evasions(weights)

    def lower(reward: float, user: UserId, stratum: str, kind: str) -> float:
        for name in (stratum, ""):
            found = [each.without(user) for means in (works, edits) if (each := means.get(name))]
            known = [mean for mean in found if mean is not None]
            if known:
                own = evading[kind][name].mean
                others = [each[name] for each in evading.values() if name in each]
                kinds = [each.mean for each in others if len(each.by_user) >= FEWEST_USERS]
                return reward - max(0.0, own - min([min(known) - price, *kinds]))
        return lowest

    return [
        lower(reward, user, stratum, kind) if kind else reward
        for reward, user, stratum, kind in zip(rewards, users, strata, evasions, strict=True)
    ]


def _mean_rewards(
    rewards: Sequence[float],
    users: Sequence[UserId],
    strata: Sequence[str],
    counted: Sequence[bool],
) -> dict[str, _Means]:
    """Mean rewards of the counted rollouts, by stratum; under "", of the window."""
    rows: dict[str, dict[UserId, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reward, user, stratum, is_counted in zip(rewards, users, strata, counted, strict=True):
        if is_counted:
            rows[stratum][user].append(reward)
            rows[""][user].append(reward)
    return {stratum: _cut_means(members) for stratum, members in rows.items()}


def _cut_means(members: Mapping[UserId, Sequence[float]]) -> _Means:
    means = {user: statistics.fmean(each) for user, each in members.items()}
    centre = statistics.median_low(means.values())
    cut = {
        user: max(centre - MAX_ADVANTAGE, min(centre + MAX_ADVANTAGE, mean))
        for user, mean in means.items()
    }
    return _Means(cut, math.fsum(cut.values()))
