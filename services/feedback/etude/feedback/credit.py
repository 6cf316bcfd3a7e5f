"""Credit: signals of users become a reward and an advantage for each rollout of a window.

Users are the unit. Each counts once in every mean, and no user's rollouts are ever compared with
the user's own.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.outcome import RolloutOutcome, SignalState

MAX_SCORE = 3.0
"""Cut of a signal's scaled value."""
MAX_ADVANTAGE = 3.0
"""Cut of an advantage, before the weight of its user, and of what a user's mean adds to those of
others."""
USER_SHARE = 0.02
"""Largest part of a window's absolute advantages that one user has, with 50 users or more."""
MEDIAN_USERS = 3.0
"""Largest multiple of the median user's absolute advantages."""
FEWEST_USERS = 3
"""A stratum of fewer users is compared with the window."""


class Credit(NamedTuple):
    """Credit of one rollout."""

    reward: float
    advantage: float
    """What the loss multiplies its tokens with."""


def reward_rollouts(
    outcomes: Sequence[RolloutOutcome], weights: Mapping[str, float]
) -> list[float]:
    """Reward r = sum of w_s * z_s over the signals that concern a rollout.  [N] -> [N].

    z is the signal's value minus its mean over the users, divided by its spread, and cut at 3: a
    window has rollouts of one version, and so z is scaled for each version. A signal that is silent
    about a rollout, or does not vary, adds nothing.
    """
    rewards = [0.0] * len(outcomes)
    for name, weight in weights.items():
        for place, score in _scores(outcomes, name).items():
            rewards[place] += weight * score
    return rewards


def lowest_reward(weights: Mapping[str, float]) -> float:
    """The lowest reward that signals with these weights can give."""
    return -MAX_SCORE * math.fsum(abs(weight) for weight in weights.values())


def credit_rewards(
    rewards: Sequence[float], users: Sequence[UserId], strata: Sequence[str]
) -> list[Credit]:
    """Credit A = clip(r - mean of the other users of its stratum, +-3) * weight of its user.

    Args:
        rewards: one per rollout. [N]
        users: their users. [N]
        strata: sets of rollouts whose users asked for comparable things. [N]
    """
    means = baselines(rewards, users, strata)
    raw = [
        max(-MAX_ADVANTAGE, min(MAX_ADVANTAGE, reward - baseline))
        for reward, baseline in zip(rewards, means, strict=True)
    ]
    weights = weigh_users(raw, users)
    return [
        Credit(reward, advantage * weights[user])
        for reward, advantage, user in zip(rewards, raw, users, strict=True)
    ]


def weigh_users(advantages: Sequence[float], users: Sequence[UserId]) -> dict[UserId, float]:
    """Weight of each user's rollouts: 1/sqrt(n) for n rollouts, and less above the cap.

    After it, no user's sum of absolute advantages is above 3 times that of the median user, nor,
    where 50 users or more have any, above 2 % of the window's.
    """
    masses: dict[UserId, float] = defaultdict(float)
    counts: dict[UserId, int] = defaultdict(int)
    for advantage, user in zip(advantages, users, strict=True):
        masses[user] += abs(advantage)
        counts[user] += 1
    masses = {user: mass / math.sqrt(counts[user]) for user, mass in masses.items()}
    cap = _mass_cap([mass for mass in masses.values() if mass > 0])
    return {
        user: min(1.0, cap / mass if mass > 0 else 1.0) / math.sqrt(counts[user])
        for user, mass in masses.items()
    }


def _mass_cap(masses: Sequence[float]) -> float:
    """Largest cap c with c <= 3 * median and c <= 2 % of the sum of min(mass, c)."""
    if not masses:
        return math.inf
    ordered = sorted(masses)
    cap = MEDIAN_USERS * statistics.median_low(ordered)
    if len(ordered) * USER_SHARE < 1:
        return cap
    # With the k largest at c: c = 0.02 * (sum of the others + k * c). k < 50, or c would be free.
    rest = math.fsum(ordered)
    for num_capped in range(len(ordered) + 1):
        if num_capped * USER_SHARE >= 1:
            break
        share_cap = USER_SHARE * rest / (1 - num_capped * USER_SHARE)
        if num_capped == len(ordered) or ordered[-1 - num_capped] <= share_cap:
            return min(cap, share_cap)
        rest -= ordered[-1 - num_capped]
    return min(cap, ordered[0])


def _scores(outcomes: Sequence[RolloutOutcome], name: str) -> dict[int, float]:
    """Scaled values of a signal, by place."""
    values = {
        place: signal.numerator / signal.denominator
        for place, outcome in enumerate(outcomes)
        if (signal := outcome.values[name]).denominator > 0
        and signal.state is not SignalState.WAITING
    }
    by_user: dict[UserId, list[float]] = defaultdict(list)
    for place, value in values.items():
        by_user[UserId(outcomes[place].tenant, outcomes[place].user)].append(value)
    if len(by_user) < FEWEST_USERS:
        return {}
    mean = statistics.fmean(statistics.fmean(each) for each in by_user.values())
    variance = statistics.fmean(
        statistics.fmean((value - mean) ** 2 for value in each) for each in by_user.values()
    )
    if variance < 1e-12:
        return {}
    spread = math.sqrt(variance)
    return {
        place: max(-MAX_SCORE, min(MAX_SCORE, (value - mean) / spread))
        for place, value in values.items()
    }


def baselines(
    rewards: Sequence[float], users: Sequence[UserId], strata: Sequence[str]
) -> list[float]:
    """Mean over the other users of a stratum of each one's mean reward.  [N] -> [N].

    Each mean counts up to 3 above or below the median of those others: k of n users move what the
    rest is compared with by about 3 * k / n, however large rewards can be. A stratum of fewer than
    3 users is compared with the whole window; a user who is alone there has the reward itself as
    baseline, and so an advantage of 0.
    """
    by_stratum: dict[str, dict[UserId, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reward, user, stratum in zip(rewards, users, strata, strict=True):
        by_stratum[stratum][user].append(reward)
        by_stratum[""][user].append(reward)
    means = {
        stratum: _mean_of_others({user: statistics.fmean(each) for user, each in members.items()})
        for stratum, members in by_stratum.items()
    }
    return [
        means[stratum if len(means[stratum]) >= FEWEST_USERS else ""].get(user, reward)
        for reward, user, stratum in zip(rewards, users, strata, strict=True)
    ]


def _mean_of_others(means: Mapping[UserId, float]) -> dict[UserId, float]:
    """Mean of the others' means for each user, cut around the median of the others; none alone."""
    others = len(means) - 1
    if not others:
        return {}
    ordered = sorted(means.values())
    middle = (others - 1) // 2
    totals: dict[float, float] = {}
    found: dict[UserId, float] = {}
    for user, mean in means.items():
        # Without the user's own, what stands behind it moves up.
        centre = ordered[middle + 1] if mean <= ordered[middle] else ordered[middle]
        if centre not in totals:
            totals[centre] = math.fsum(_cut(each, centre) for each in ordered)
        found[user] = (totals[centre] - _cut(mean, centre)) / others
    return found


def _cut(mean: float, centre: float) -> float:
    return max(centre - MAX_ADVANTAGE, min(centre + MAX_ADVANTAGE, mean))
