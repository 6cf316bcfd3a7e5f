"""Registry of reward functions: those of Etude, and those that installed packages add."""

from collections.abc import Mapping
from types import MappingProxyType

from etude.common import extensions
from etude.rewards.functions import (
    broken_calls,
    communication,
    deferral,
    habits,
    hacks,
    judge,
    length_penalty,
    style,
    unfinished,
    verifier,
)
from etude.rewards.functions.base import RewardFunction

FUNCTIONS: Mapping[str, RewardFunction] = MappingProxyType(
    {
        "Verifier": verifier.FUNCTION,
        "LengthPenalty": length_penalty.FUNCTION,
        "BrokenCalls": broken_calls.FUNCTION,
        "Unfinished": unfinished.FUNCTION,
        "Style": style.FUNCTION,
        "Communication": communication.FUNCTION,
        "Habits": habits.FUNCTION,
        "Deferral": deferral.FUNCTION,
        "Judge": judge.FUNCTION,
        "Hacks": hacks.FUNCTION,
    }
)


def find_function(name: str) -> RewardFunction:
    """Find a function that a manifest names, which the API checked.

    Raises:
        UserError: a package's function is not installed or broken.
    """
    if extensions.is_extension(name):
        return extensions.load_extension(extensions.REWARD_FUNCTIONS, name, RewardFunction)
    return FUNCTIONS[name]
