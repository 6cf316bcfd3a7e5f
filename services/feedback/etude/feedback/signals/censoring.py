"""Censoring of edits: the chance that an edit is still looked at, by Kaplan and Meier."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SMALLEST_CHANCE = 0.1
"""A smaller chance of being looked at counts as this: no edit stands for more than ten."""


class LineLoss(NamedTuple):
    """Part of an edit's lines that was found missing."""

    age_s: float
    share: float


class EditFate(NamedTuple):
    """Lines of one edit, as far as they were looked at. All shares are of its lines."""

    losses: tuple[LineLoss, ...]
    """Up to the horizon, by age."""
    seen_s: float
    """Age up to which it was looked at, at most the horizon: below it, the rest is censored."""

    @property
    def share_left(self) -> float:
        """Share of the lines that were not found missing."""
        return max(0.0, 1.0 - sum(loss.share for loss in self.losses))


@dataclass(frozen=True, slots=True)
class CensoringCurve:
    """Chance G(t) that an edit is looked at beyond an age; 1 without censored edits."""

    ages_s: Sequence[float] = ()
    """At which edits were censored, ascending."""
    chances: Sequence[float] = ()
    """G at each of these ages."""

    def chance_before(self, age_s: float) -> float:
        """G(t-): the chance to be looked at up to an age, that age not included."""
        place = bisect_left(self.ages_s, age_s)
        return self.chances[place - 1] if place else 1.0


def estimate_censoring(fates: Iterable[EditFate], *, horizon_s: float) -> CensoringCurve:
    """Estimate the curve from edits, each of which counts 1, divided among its lines.

    Censoring is the event here and a loss ends the observation; of both at one age the loss comes
    first. Source: Kaplan and Meier 1958, https://doi.org/10.1080/01621459.1958.10501452.
    """
    censored: dict[float, float] = defaultdict(float)
    lost: dict[float, float] = defaultdict(float)
    at_risk = 0.0
    for fate in fates:
        at_risk += 1.0
        for loss in fate.losses:
            lost[loss.age_s] += loss.share
        if fate.seen_s < horizon_s:
            censored[fate.seen_s] += fate.share_left
    ages: list[float] = []
    chances: list[float] = []
    chance = 1.0
    for age in sorted({*censored, *lost}):
        at_risk -= lost.get(age, 0.0)
        leaving = censored.get(age, 0.0)
        if leaving > 0 and at_risk > 0:
            chance *= max(0.0, 1.0 - leaving / at_risk)
            at_risk -= leaving
            ages.append(age)
            chances.append(chance)
    return CensoringCurve(ages, chances)


def persistence(fate: EditFate, curve: CensoringCurve) -> float:
    """Unbiased estimate of the share of an edit's lines alive at the horizon; may be negative.

    Y = 1 - sum of the shares lost at T <= min(C, h), each divided by max(G(T-), 0.1): losses that
    were seen stand for those of edits that were no longer looked at. Its mean estimates the
    survival at the horizon where censoring does not depend on the fate (inverse probability of
    censoring weights; Robins and Rotnitzky 1992).
    """
    return 1.0 - sum(
        loss.share / max(curve.chance_before(loss.age_s), SMALLEST_CHANCE) for loss in fate.losses
    )
