"""Advantage estimators and advantage normalisation within groups of sibling rollouts.

Shapes: R rollouts of one batch. A rollout takes part if it is valid and has a valid sibling; the
others get 0, because a group of one has no baseline.
"""

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Groups = NDArray[np.int64]
Flags = NDArray[np.bool_]

_SPREAD_FLOOR = 1e-6
"""Keeps a group of equal rewards finite; verl's value."""

_ROUNDING = 1e-12
"""Relative size of a difference that counts as zero; double precision rounds at 2e-16."""


def takes_part(groups: Groups, valid: Flags) -> Flags:
    """Select the rollouts that are valid and have a valid sibling. [R]."""
    return valid & (_count(groups, valid) >= 2)


def centred_rewards(rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
    """Reward minus the mean of its group; sums to zero over each group. [R].

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783.
    """
    part = takes_part(groups, valid)
    mean = _sum(np.where(part, rewards, 0.0), groups) / np.maximum(_count(groups, part), 1)
    difference = np.where(part, rewards, mean) - mean
    # Equal rewards must give exactly 0, also when their mean is rounded.
    return np.where(np.abs(difference) <= _ROUNDING * (1 + np.abs(mean)), 0.0, difference)


def normalised_rewards(rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
    """Reward minus the mean of its group, over the group's standard deviation. [R].

    It amplifies the noise of nearly equal groups; centring alone does not.

    Source: GRPO, https://arxiv.org/abs/2402.03300.
    """
    difference = centred_rewards(rewards, groups=groups, valid=valid)
    siblings = np.maximum(_count(groups, takes_part(groups, valid)) - 1, 1)
    spread = np.sqrt(_sum(difference**2, groups) / siblings)
    result: Reals = difference / (spread + _SPREAD_FLOOR)
    return result


def leave_one_out(rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
    """Reward minus the mean of its siblings, G/(G-1) times the centred one. [R].

    Source: RLOO, https://arxiv.org/abs/2402.14740.
    """
    count = _count(groups, takes_part(groups, valid))
    scale: Reals = count / np.maximum(count - 1, 1)
    return centred_rewards(rewards, groups=groups, valid=valid) * scale


def _sum(values: Reals, groups: Groups) -> Reals:
    """Replace each entry by the sum over its group. [R]."""
    _, place = np.unique(groups, return_inverse=True)
    totals: Reals = np.bincount(place, weights=values).astype(np.float64)
    return totals[place]


def _count(groups: Groups, flags: Flags) -> Reals:
    return _sum(flags.astype(np.float64), groups)
