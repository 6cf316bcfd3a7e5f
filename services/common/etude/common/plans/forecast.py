"""Demand forecast: environments of a template that the waves of plans will need."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

GRID = 16
"""Sampled moments of a horizon, in addition to the starts of waves."""


class Assurance(NamedTuple):
    """Share of cases in which the supply is enough."""

    share: float
    deviations: float
    """Above the mean, of a normal distribution."""


def assurance(share: float) -> Assurance:
    """That of a share of all cases, between 0 and 1."""
    return Assurance(share, _NORMAL.inv_cdf(share))


_NORMAL = NormalDist()
USUAL = assurance(0.95)


class Quantile(NamedTuple):
    """A share of leases, and the seconds within which they end."""

    share: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Environments of one template that start together."""

    template: str
    count: int
    start_s: float
    """On the caller's clock."""
    sigma_s: float = 0.0
    lease: tuple[Quantile, ...] = ()
    """Time that they are held, by share; empty: longer than any horizon."""
    with_image: int = 0
    """Environments of count that start from a task's image, not from the template's own."""


class CountDistribution(NamedTuple):
    """A random number's mean, its variance, and the most that it can be."""

    mean: float
    variance: float
    most: float


def start_probability(wave: Wave, at_s: float) -> float:
    """Probability that a wave has started by then."""
    if wave.sigma_s <= 0:
        return float(at_s >= wave.start_s)
    return 0.5 * (1 + math.erf((at_s - wave.start_s) / (wave.sigma_s * math.sqrt(2))))


def survival(lease: Sequence[Quantile], age_s: float) -> float:
    """Share of leases that are held for longer, linear between the quantiles.

    What the quantiles leave open ends within twice the last of them.
    """
    if not lease or age_s <= 0:
        return 1.0
    points = [Quantile(0.0, 0.0), *lease, Quantile(1.0, 2 * lease[-1].seconds)]
    for before, after in pairwise(points):
        if age_s < after.seconds:
            part = (age_s - before.seconds) / (after.seconds - before.seconds)
            return 1 - before.share - part * (after.share - before.share)
    return 0.0


def held_environments(wave: Wave, at_s: float) -> CountDistribution:
    """Environments of a wave that are held at a moment.

    All of a wave start or none: with S whether it has, the variance is E[Var | S] + Var E[. | S].
    """
    part = _part(wave, at_s)
    return CountDistribution(part.mean, part.inner + part.outer, float(wave.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEnvironments:
    """Environments of one template that are held already, of about the same age."""

    count: int
    age_s: float
    lease: tuple[Quantile, ...] = ()


def remaining_environments(running: RunningEnvironments, after_s: float) -> CountDistribution:
    """Environments that are held now and still held after some time."""
    now = survival(running.lease, running.age_s)
    # An environment older than all known leases gives no hint of its end.
    stay = survival(running.lease, running.age_s + after_s) / now if now > 0 else 1.0
    mean = running.count * stay
    return CountDistribution(mean, mean * (1 - stay), float(running.count))


def demand(
    waves: Sequence[Wave],
    at_s: float,
    *,
    base: Sequence[CountDistribution] = (),
    enough: Assurance = USUAL,
) -> float:
    """Environments that are enough at a moment, in the given share of cases.

    Never more than all waves. Many waves add up to a normal distribution. Few do not: one is wanted
    whole once the chance that it has started exceeds the accepted chance of too little.

    Args:
        waves: that have not come.
        at_s: the moment.
        base: of leases that others began before.
        enough: in how many cases.
    """
    parts = [_part(wave, at_s) for wave in waves]
    sure = sum(spread.mean for spread in base)
    ends = sum(spread.variance for spread in base) + sum(part.inner for part in parts)
    mean = sure + sum(part.mean for part in parts)
    deviation = math.sqrt(ends + sum(part.outer for part in parts))
    alone = [part for part in parts if part.started >= 1 - enough.share]
    # Waves of one run come in their order, so those that are likely enough come together.
    ordered = sure + sum(part.whole for part in alone) + enough.deviations * math.sqrt(ends)
    independent = mean + enough.deviations * deviation
    least = max((mean - part.mean + part.whole for part in alone), default=0.0)
    most = sum(float(wave.count) for wave in waves) + sum(spread.most for spread in base)
    return min(most, max(least, min(independent, ordered)))


class _Part(NamedTuple):
    """Contribution of a wave to a moment's demand."""

    started: float
    whole: float
    """What is held if it has started."""
    mean: float
    inner: float
    """Variance from how long environments are kept."""
    outer: float
    """Variance from whether the wave has started."""


def _part(wave: Wave, at_s: float) -> _Part:
    start, stay = start_probability(wave, at_s), survival(wave.lease, at_s - wave.start_s)
    whole = wave.count * stay
    return _Part(
        start, whole, whole * start, whole * (1 - stay) * start, whole**2 * start * (1 - start)
    )


def peak(waves: Sequence[Wave], now_s: float, horizon_s: float) -> float:
    """The most that is wanted at any moment from now to the horizon."""
    until_s = now_s + horizon_s
    moments = {now_s + horizon_s * step / GRID for step in range(GRID + 1)}
    moments |= {wave.start_s for wave in waves if now_s < wave.start_s < until_s}
    near = [wave for wave in waves if start_probability(wave, until_s) > 1e-3]
    return max((demand(near, at_s) for at_s in moments), default=0.0)


class Supply(NamedTuple):
    """Speed at which a pool makes environments of a template ready."""

    start_s: float
    """What nineteen of twenty starts stay below."""
    ready: int
    """Ready, or about to be."""
    per_second: float
    """More of them."""


def lead_s(count: float, supply: Supply) -> float:
    """Seconds until `count` more environments are ready."""
    return supply.start_s + max(0.0, count) / max(supply.per_second, 1e-3)
