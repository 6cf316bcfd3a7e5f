"""Figures of the real-time demo: changes between two rounds of visits, and the promises."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from etude.feedback.simulate.population import Visit

REPEATS = 2_000
_LEVEL = (2.5, 97.5)


class RatioChange(NamedTuple):
    """A ratio before and after, and the 95 % interval of its difference."""

    before: float
    after: float
    low: float
    high: float

    def describe(self) -> str:
        """The change in a few words."""
        return f"{self.before:.3f} -> {self.after:.3f} [{self.low:+.3f}, {self.high:+.3f}]"


class UserRatio(NamedTuple):
    """Sums of one visit's numerator and denominator."""

    numerator: float
    denominator: float


class RoundTruth(NamedTuple):
    """Persistence and complaints of one round of visits, as shares from 0 to 1."""

    persistence: float
    complaints: float


class ArmTruth(NamedTuple):
    """Visits of the users whom one version served."""

    name: str
    num_visits: int
    complaints: float
    """Share of them, from 0 to 1."""


Measure = Callable[[Visit], UserRatio]
Say = Callable[[str], None]
"""Tells people how the demo goes on."""


def kept_share(visit: Visit) -> UserRatio:
    """Share of the policy's lines that are alive at the horizon: the hidden truth.

    Each visit counts once, however long its edits are: users are the unit. Summed over lines, a
    conversation of many edits counts many times, and the interval is half as wide again.
    """
    found = visit.reactions
    if found is None or not found.num_lines:
        return UserRatio(0, 0)
    return UserRatio(found.num_kept_lines / found.num_lines, 1)


def complaints(visit: Visit) -> UserRatio:
    """Conversations that their user complained about."""
    found = visit.reactions
    return UserRatio(found.has_complained, 1) if found else UserRatio(0, 0)


def sum_ratio(visits: Sequence[Visit], measure: Measure) -> float:
    """Ratio of the sums over some visits; 0 if there is nothing to divide by."""
    found = [measure(visit) for visit in visits]
    whole = sum(each.denominator for each in found)
    return sum(each.numerator for each in found) / whole if whole else 0.0


def compare_rounds(
    before: Sequence[Visit], after: Sequence[Visit], measure: Measure, *, seed: int
) -> RatioChange:
    """Compare a ratio of two rounds; users are drawn with replacement, each with both visits.

    Args:
        before: visits of the first round. [N]
        after: of the second; users may be missing. [M]
        measure: numerator and denominator of one visit.
        seed: of the draws.

    Source: percentile bootstrap over clusters, Efron & Tibshirani 1993, chapter 13.
    """
    users = sorted({visit.user for visit in (*before, *after)})
    place = {user: number for number, user in enumerate(users)}
    sums = np.zeros((len(users), 4))
    for offset, visits in ((0, before), (2, after)):
        for visit in visits:
            sums[place[visit.user], offset : offset + 2] += measure(visit)
    random = np.random.default_rng(seed)
    counts = random.multinomial(len(users), np.full(len(users), 1 / len(users)), REPEATS)
    drawn = counts @ sums
    differences = _ratio(drawn[:, 2:]) - _ratio(drawn[:, :2])
    known = differences[np.isfinite(differences)]
    # Without a visit that the ratio concerns, there is no interval.
    low, high = np.percentile(known, _LEVEL) if known.size else (-np.inf, np.inf)
    total = sums.sum(axis=0)[None]
    return RatioChange(
        float(_ratio(total[:, :2])[0]), float(_ratio(total[:, 2:])[0]), float(low), float(high)
    )


def _ratio(sums: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(sums[:, 0], sums[:, 1])


def median_latency_s(visits: Sequence[Visit]) -> float:
    """Median over the visits of the mean time that a turn took."""
    return float(np.median([v.latency_s for v in visits if v.conversation.turns]))


class PromiseCheck(NamedTuple):
    """One promise that an act checked."""

    promise: str
    """Such as P1; a dash for what the act itself shows."""
    what: str
    is_held: bool
