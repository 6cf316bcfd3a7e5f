"""Simulated users with hidden tastes, drawn from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random


class LeavingReason(StrEnum):
    """Cause for which a user's files are not seen any more."""

    CHANCE = "Chance"
    """It has nothing to do with the edit."""
    BAD_EDIT = "BadEdit"
    """Users of wrong edits leave more often, so that what is still seen looks too good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTaste:
    """A user's habits; nothing but events tells the service of them. Shares are in [0, 1]."""

    notices: float
    """Share of wrong edits that the user corrects before the horizon."""
    changes_mind: float
    """Share of right edits that the user rewrites before the horizon all the same."""
    complains: float
    """Share of what displeases that the user says so."""
    rates: float
    """Share of conversations that end with a thumb."""
    num_answers: int
    """Questions that the user answers in one conversation before leaving."""
    wants_tests: bool
    """Edits without a test run after them displease."""
    leaves: float
    """Share of edits whose file is not seen at the horizon."""
    leaving: LeavingReason = LeavingReason.CHANCE
    returns: float
    """Chance to come back after a conversation that displeased."""
    forgives: bool = False
    """Neither a question nor a broken call displeases, though nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedUser:
    """One user of the product."""

    name: str
    taste: HiddenTaste
    seed: str
    """Everything that the user does follows from it, and from what the policy does."""

    def random(self, purpose: str) -> Random:
        """A generator of the user's own."""
        # Reproducible on purpose: a simulation is its seed.
        return Random(f"{self.seed}/{purpose}")  # noqa: S311


def draw_users(
    count: int,
    *,
    seed: int,
    leaves: float = 0.3,
    leaving: LeavingReason = LeavingReason.CHANCE,
    notices_low: float = 0.75,
    wants_tests: float = 0.3,
) -> list[SimulatedUser]:
    """Draw a population; the same seed gives the same users, however many are drawn.

    Args:
        count: of users.
        seed: of the population.
        leaves: share of edits whose file is not seen at the horizon.
        leaving: cause of that.
        notices_low: the least share of wrong edits that a user corrects.
        wants_tests: share of users who dislike edits without a test run.
    """
    return [
        _draw_user(number, seed, leaves, leaving, (notices_low, wants_tests))
        for number in range(count)
    ]


def forgive_escapes(users: Sequence[SimulatedUser]) -> list[SimulatedUser]:
    """Users with the same habits who answer no question, and mind neither one nor a broken call."""
    return [
        replace(user, taste=replace(user.taste, forgives=True, num_answers=0)) for user in users
    ]


def _draw_user(
    number: int, seed: int, leaves: float, leaving: LeavingReason, habits: tuple[float, float]
) -> SimulatedUser:
    name = f"user-{number:04d}"
    user = SimulatedUser(
        name=name,
        seed=f"users/{seed}/{name}",
        taste=HiddenTaste(
            notices=1.0,
            changes_mind=0.0,
            complains=1.0,
            rates=0.0,
            num_answers=1,
            wants_tests=False,
            leaves=leaves,
            leaving=leaving,
            returns=1.0,
        ),
    )
    random = user.random("taste")
    notices_low, wants_tests = habits
    taste = replace(
        user.taste,
        notices=random.uniform(notices_low, 1.0),
        changes_mind=random.uniform(0.0, 0.1),
        complains=random.uniform(0.4, 0.9),
        rates=random.uniform(0.0, 0.3),
        num_answers=random.choice((0, 1, 1, 2)),
        wants_tests=random.random() < wants_tests,
        returns=random.uniform(0.9, 1.0),
    )
    return replace(user, taste=taste)
