"""Probability model of the parts of a change, given the sizes of its tile's classes.

All of it is integer arithmetic, so that every machine codes the same bytes. The constants fit
updates of about one size per tile: they cost or save bits, never correctness.
"""

import math

import numpy as np

from etude.common.weights.coding.codecs.classes import Counts
from etude.common.weights.coding.codecs.rans import CERTAIN, Chances
from etude.common.weights.tensors.jit import compiled

LEVELS = 16
"""Contexts of a difference's width: octaves of the odds that an element of its class changes."""

STEPS = 32
"""Most steps of a width."""

_SPARSE = (64, 8000)
_WIDER = (
    *(7 * (_SPARSE,)),
    (1000, 2000),
    (11000, 1500, 6000),
    (29000, 6000, 10000),
    (44000, 23000, 17000),
    (55000, 45000, 30000),
    (60000, 54000, 43000, 28000),
    (62000, 58000, 50000, 36000, 18000),
    (62000, 58000, 52000, 40000, 20000),
    (62000, 60000, 56000, 48000, 36000),
)
"""Chance in 1/65536 that a difference of 2^t or more is one of 2^(t+1) or more: by level, by t."""

_EVEN = 32768
_UPPER_HALF = 20500
"""Chance that |d| lies in the upper half of its octave: small differences are more frequent."""

_SEEN = 4 << 16
"""What these are worth as observations."""


def initial() -> Chances:
    """Adaptive bits before the first change.

    Returns:
        A row of widths per level, then one of upper halves, by width. [17, 32]
    """
    chances = np.full((LEVELS + 1, STEPS), _EVEN, np.uint32)
    for level, row in enumerate(_WIDER):
        chances[level, : len(row)] = row
    chances[LEVELS] = _UPPER_HALF
    return chances + np.uint32(_SEEN)


_FALL = np.array([round(CERTAIN * math.exp(-j / 256)) for j in range(193)], np.int64)
"""exp(-j / 256) in 1/4096."""


@compiled
def width_of(value: int) -> int:
    """Bits of a number: 0 of 0, 1 of 1."""
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@compiled
def level_of(changed: int, size: int) -> int:
    """Octave of the odds to change: 8 is one to one up to two to one."""
    same = size - changed + 1
    if changed >= same:
        return min(width_of(changed // same) + 7, LEVELS - 1)
    return max(8 - width_of((same - 1) // changed), 0)


@compiled
def run_bits(left: int, size: int, near: int) -> int:
    """The run of elements that one bit passes over, 2^b: largest b with 2^(b+1) * left <= size.

    Or 0 if there is none. The search starts from `near`, which changes nothing but its time.
    """
    b = near
    while (left << (b + 2)) <= size:
        b += 1
    while b > 0 and (left << (b + 1)) > size:
        b -= 1
    return b


@compiled
def pass_chance(left: int, size: int, b: int) -> int:
    """Chance in 1/4096 that none of the next 2^b elements changes, if `left` of `size` do.

    (1 - 2^b / size)^left = exp(-mean - mean^2 / (2 left) - ...) with mean = left 2^b / size.
    """
    if b == 0 or left == 1:
        chance = (CERTAIN * (size - (left << b))) // size
    else:
        # Both are below 2^26, and short divisions take half the time.
        mean = int(np.int64(np.uint32(left << (b + 8)) // np.uint32(size)))
        chance = _FALL[mean + (mean * mean) // (512 * left)]
    return min(max(int(chance), 1), CERTAIN - 1)


@compiled
def first_prior() -> Counts:
    """Prior before the first class, whose weights are smallest: most of it changes."""
    return np.array([48, 16], np.int64)


@compiled
def expected(prior: Counts, size: int) -> int:
    """Changes of a class to expect, from the classes before it."""
    return int((size * prior[0]) // max(prior[0] + prior[1], 1))


@compiled
def learn(prior: Counts, changed: int, size: int) -> None:
    """Add a class and turn to the next.

    From one octave of weights to the next, the odds fall to 1 / (2 + chance) of what they were;
    what was learned so far counts for a quarter there.
    """
    a = prior[0] + 16 * changed
    b = prior[1] + 16 * (size - changed)
    a = (a * (a + b) + 1) // (3 * a + 2 * b + 1)
    prior[0] = (a + 2) >> 2
    prior[1] = (b + 2) >> 2


@compiled
def rice_bits(mean: int) -> int:
    """Rice parameter for the distance of a count from its expectation."""
    return (width_of(mean) + 1) >> 1
