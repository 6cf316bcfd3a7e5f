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


def price_evasions(
    outcomes: Sequence[RolloutOutcome],
    counts: Sequence[RolloutCounts],
    weights: Mapping[str, float],
) -> list[float]:
    """Price of each rollout that avoids the work; 0 for one that does not.  [N], [N] -> [N].

    It is twice the weight of its signal: the spread of what is true or false is at most 1/2, and so
    a scaled signal tells two rollouts apart by 2 or more. A weight of 0 turns the price off.
    """
    return [
        max(_price_question(outcome, weights), _price_broken_calls(each, weights))
        for outcome, each in zip(outcomes, counts, strict=True)
    ]


def _price_question(outcome: RolloutOutcome, weights: Mapping[str, float]) -> float:
    value = outcome.values[deferral.SIGNAL.name]
    is_evasion = value.denominator > 0 and value.numerator > 0
    return max(0.0, -SCALE * weights.get(deferral.SIGNAL.name, 0.0)) if is_evasion else 0.0


def _price_broken_calls(counts: RolloutCounts, weights: Mapping[str, float]) -> float:
    # Not a share of its calls: a policy learns to read until one broken call among many ends it.
    is_evasion = counts.broken_calls > 0 and not counts.edits
    weight = weights.get(broken_tool_call.SIGNAL.name, 0.0)
    return max(0.0, -SCALE * weight) if is_evasion else 0.0


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
    prices: Sequence[float],
    has_edits: Sequence[bool],
    weights: Mapping[str, float],
) -> list[float]:
    """Rewards, with evasions worth less in the mean than the work by their price.  [N] -> [N].

    The worth of the work is the smaller of two means over the other users of a stratum: of rollouts
    that edit, and of all that do not evade. Evasions of one price lose as much as their mean is
    above that worth less the price, and keep their differences. So their mean advantage is never
    above 0. Where no rollout works, in the stratum or the window, all evasions get the lowest
    reward, and nothing is learned.

    Args:
        rewards: of signals. [N]
        users: their users. [N]
        strata: sets of rollouts that are compared. [N]
        prices: of evasions; 0 for rollouts that work. [N]
        has_edits: rollouts that applied an edit. [N]
        weights: of the signals.
    """
    works = _mean_rewards(rewards, users, strata, [not price for price in prices])
    edits = _mean_rewards(rewards, users, strata, has_edits)
    evading = {
        price: _mean_rewards(rewards, users, strata, [each == price for each in prices])
        for price in {*prices} - {0.0}
    }
    lowest = lowest_reward(weights)

    def lower(reward: float, user: UserId, stratum: str, price: float) -> float:
        for name in (stratum, ""):
            found = [each.without(user) for means in (works, edits) if (each := means.get(name))]
            known = [mean for mean in found if mean is not None]
            if known:
                excess = evading[price][name].mean - (min(known) - price)
                return reward - max(0.0, excess)
        return lowest

    return [
        lower(reward, user, stratum, price) if price else reward
        for reward, user, stratum, price in zip(rewards, users, strata, prices, strict=True)
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
