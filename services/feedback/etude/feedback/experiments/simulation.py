"""Experiments on simulated users: power and false positives before anyone is assigned."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from etude.feedback.experiments.msprt import sequence_margin
from etude.feedback.experiments.spending import boundaries
from etude.feedback.experiments.user_moments import (
    Difference,
    Floats,
    UserMoments,
    compare_arms,
)

NUM_TYPES = 1 << 16
"""Equally frequent types of users, from which users are drawn."""
MAX_EVENTS = 181
"""Of a user: products of counts fit into 16 bits."""
BATCH_USERS = 1 << 22
"""Users drawn together; bounds the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Users as clusters: a geometric number of events, and a probability of success of each user.

    The probabilities are beta-distributed, so successes of a user are beta-binomial.
    """

    events_per_user: float = 1.0
    """Mean number of events."""
    correlation: float = 0.0
    """Between two events of one user (intra-class correlation)."""

    def __post_init__(self) -> None:
        if not 1 <= self.events_per_user <= 10:
            raise ValueError(f"events_per_user must be from 1 to 10, is {self.events_per_user}")
        if not 0 <= self.correlation < 1:
            raise ValueError(f"correlation must be from 0 to below 1, is {self.correlation}")

    def types(self, rate: float) -> NDArray[np.int64]:
        """Successes and events of each type of users, [NUM_TYPES, 2], for a rate of success.

        Quantiles of the joint distribution, in the order of successes above the expected ones:
        so the rate of all types together is exact to 1e-5.
        """
        cells = list(self._cells(rate))
        counts = np.concatenate(
            [
                np.stack([np.arange(events + 1), np.full(events + 1, events)], axis=1)
                for events, _ in cells
            ]
        )
        order = np.argsort(counts[:, 0] - rate * counts[:, 1], kind="stable")
        cumulative = np.cumsum(np.concatenate([masses for _, masses in cells])[order])
        middles = (np.arange(NUM_TYPES) + 0.5) / NUM_TYPES * cumulative[-1]
        return np.asarray(counts[order][np.searchsorted(cumulative, middles)], np.int64)

    def _cells(self, rate: float) -> Iterator[tuple[int, Floats]]:
        """Each number of events, with the probabilities of it and of 0 to all successes."""
        spread = self.correlation / (1 - self.correlation)
        stops = 1 / self.events_per_user
        for events in range(1, MAX_EVENTS + 1):
            mass = stops * (1 - stops) ** (events - 1)
            if mass < 1e-9:
                return
            steps = np.arange(events)
            none = np.prod((1 - rate + steps * spread) / (1 + steps * spread))
            # Each probability over the one of a success less.
            up = (events - steps) * (rate + steps * spread)
            down = (steps + 1) * (1 - rate + (events - steps - 1) * spread)
            yield events, mass * none * np.concatenate([[1.0], np.cumprod(up / down)])


def draw_arm(
    types: NDArray[np.int64], users: Sequence[int], repeats: int, rng: np.random.Generator
) -> UserMoments:
    """Sums over the first users of an arm, [repeats, looks], for rising numbers of users."""
    first, second = types[:, 0], types[:, 1]
    tables = [
        np.asarray(table, np.int16)
        for table in (first, second, first * first, first * second, second * second)
    ]
    steps = np.diff([0, *users])
    totals = np.zeros((repeats, len(users), len(tables)))
    for look, step in enumerate(steps.tolist()):
        rows = max(1, BATCH_USERS // step)
        for start in range(0, repeats, rows):
            stop = min(start + rows, repeats)
            drawn = rng.integers(NUM_TYPES, size=(stop - start, step), dtype=np.uint16)
            drawn = drawn.astype(np.intp)
            for index, table in enumerate(tables):
                totals[start:stop, look, index] = table[drawn].sum(axis=1, dtype=np.int64)
    totals = totals.cumsum(axis=1)
    sums = np.zeros((*totals.shape[:2], 3))
    sums[..., :2] = totals[..., :2]
    products = np.zeros((*totals.shape[:2], 3, 3))
    products[..., 0, 0], products[..., 1, 1] = totals[..., 2], totals[..., 4]
    products[..., 0, 1] = products[..., 1, 0] = totals[..., 3]
    counts = np.broadcast_to(np.asarray(users, np.float64), totals.shape[:2])
    return UserMoments(users=counts, sums=sums, products=products)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The same looks at many experiments, of candidates without an effect and with one."""

    users: tuple[int, ...]
    """Of each arm, at each look."""
    effect: float
    """True difference of the candidates that have one."""
    equal: Difference
    """Of candidates without an effect, [repeats, looks]."""
    different: Difference
    """Of candidates with the effect, [repeats, looks]."""

    def select(self, looks: Sequence[int]) -> "Draws":
        """The same experiments at some of their looks, by index."""
        index = list(looks)
        equal, different = (
            Difference(
                control=each.control[:, index],
                treatment=each.treatment[:, index],
                value=each.value[:, index],
                variance=each.variance[:, index],
            )
            for each in (self.equal, self.different)
        )
        users = tuple(self.users[look] for look in index)
        return replace(self, users=users, equal=equal, different=different)


def draw_experiments(
    population: Population,
    rates: tuple[float, float],
    users: tuple[int, ...],
    repeats: int,
    *,
    seed: int = 0,
) -> Draws:
    """Experiments with rates of success of the stable checkpoint and of another candidate."""
    rng = np.random.default_rng(seed)
    stable, candidate = (population.types(rate) for rate in rates)
    control = draw_arm(stable, users, repeats, rng)
    equal = compare_arms(control, draw_arm(stable, users, repeats, rng))
    different = compare_arms(control, draw_arm(candidate, users, repeats, rng))
    return Draws(users=users, effect=rates[1] - rates[0], equal=equal, different=different)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingCharacteristics:
    """Decisions of a stopping rule over many experiments."""

    false_positives: float
    """Share of candidates without an effect that it called better or worse."""
    power: float
    """Share of candidates with an effect that it called better or worse, rightly."""
    median_users: int | None
    """Of an arm, when it did."""


def try_spending(draws: Draws, planned_users: int, alpha: float) -> OperatingCharacteristics:
    """Spend alpha at the realised fractions of the planned users; the last look is final."""
    fractions = tuple(count / planned_users for count in draws.users)
    return try_limits(draws, boundaries(fractions, alpha, is_final=True))


def try_limits(draws: Draws, limits: Sequence[float]) -> OperatingCharacteristics:
    """Stop where |z| is above the limit of its look."""
    crosses = (np.abs(each.z) > np.asarray(limits) for each in (draws.equal, draws.different))
    return _characteristics(draws, *crosses)


def try_msprt(draws: Draws, tau: float, alpha: float) -> OperatingCharacteristics:
    """Stop where the confidence sequence leaves out no difference."""
    crosses = (
        np.abs(each.value) > sequence_margin(each, tau, alpha)
        for each in (draws.equal, draws.different)
    )
    return _characteristics(draws, *crosses)


def _characteristics(
    draws: Draws, equal: NDArray[np.bool_], different: NDArray[np.bool_]
) -> OperatingCharacteristics:
    """From whether a rule would stop, [repeats, looks]; the first look at which it does counts."""
    first = different.argmax(axis=1)
    values = draws.different.value[np.arange(len(first)), first]
    is_right = different.any(axis=1) & (values * draws.effect > 0)
    stops = np.asarray(draws.users)[first[is_right]]
    return OperatingCharacteristics(
        false_positives=float(equal.any(axis=1).mean()),
        power=float(is_right.mean()),
        median_users=int(np.median(stops)) if stops.size else None,
    )
