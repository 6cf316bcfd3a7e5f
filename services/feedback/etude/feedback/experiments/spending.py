"""Alpha spending: boundaries of a two-sided test that is looked at several times.

The function of Lan and DeMets (Biometrika 70, 1983) of the O'Brien-Fleming type says how much of
alpha may be spent by an information fraction t: 4·(1 - Φ(z / √t)), z being the quantile of
1 - alpha/4. A boundary takes what that allows at the realised fraction, less what earlier looks
have spent, so looks need be neither equal nor planned. Boundaries follow by recursive integration
(Armitage, McPherson and Rowe, 1969).
"""

import math
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_STEP = 0.001
"""Information since the last look below which a look decides nothing, and spends nothing."""
MIN_SPENDING = 1e-12
"""The same for alpha: |z| would have to be above 7."""
NODES_PER_PANEL = 8
_NORMAL = NormalDist()
_QUADRATURE = np.polynomial.legendre.leggauss(NODES_PER_PANEL)


def spent_alpha(fraction: float, alpha: float) -> float:
    """Part of alpha that may be spent by an information fraction; all of it from 1 on."""
    if fraction >= 1:
        return alpha
    if fraction <= 0:
        return 0.0
    return 2 * math.erfc(-_NORMAL.inv_cdf(alpha / 4) / math.sqrt(2 * fraction))


@lru_cache(maxsize=256)
def boundaries(
    fractions: tuple[float, ...], alpha: float, *, is_final: bool = False
) -> tuple[float, ...]:
    """Limit of |z| at each look, in their order; infinite where a look cannot decide.

    Fractions are the realised information at each look, over the planned one. A fraction of 1 or
    more spends all of alpha that is left, and so does the last one if no data follow (`is_final`).

    Raises:
        ValueError: fractions do not rise from above 0, or alpha is not between 0 and 1.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, is {alpha}")
    steps = [b - a for a, b in zip((0.0, *fractions), fractions, strict=False)]
    if any(not step > 0 for step in steps):
        raise ValueError(f"information fractions must rise from above 0: {fractions}")
    width = math.sqrt(max(MIN_STEP, min(steps, default=1.0)))
    limits, spent, state = [], 0.0, _State.start()
    for index, fraction in enumerate(fractions):
        is_last = is_final and index == len(fractions) - 1
        spending = (alpha if is_last else spent_alpha(fraction, alpha)) - spent
        step = fraction - state.fraction
        if spending < MIN_SPENDING or step < MIN_STEP:
            limits.append(math.inf)
            continue
        limit = state.solve(step, spending)
        limits.append(limit / math.sqrt(fraction))
        state, spent = state.advance(step, limit, width), spent + spending
    return tuple(limits)


class _State(NamedTuple):
    """Distribution of z·√t over the paths that no boundary has stopped, as masses at nodes."""

    fraction: float
    nodes: NDArray[np.float64]
    masses: NDArray[np.float64]

    @classmethod
    def start(cls) -> "_State":
        return cls(0.0, np.zeros(1), np.ones(1))

    def solve(self, step: float, spending: float) -> float:
        """Value of |z|·√t that is exceeded with a given probability after a step of information."""
        low, high = 0.0, 40 * math.sqrt(self.fraction + step)
        while high - low > 1e-9:
            middle = (low + high) / 2
            distances = (middle - self.nodes) / math.sqrt(2 * step)
            # Both sides: the distribution is symmetric, and half of erfc is one tail.
            tails = np.fromiter(map(math.erfc, distances.tolist()), np.float64)
            if tails @ self.masses > spending:
                low = middle
            else:
                high = middle
        return high

    def advance(self, step: float, limit: float, width: float) -> "_State":
        """The distribution inside a limit after a step, at nodes for steps of such a deviation."""
        panels = math.ceil(limit / width)
        edges = np.linspace(-limit, limit, panels + 1)
        half = limit / panels
        points, weights = _QUADRATURE
        nodes = (((edges[:-1] + edges[1:]) / 2)[:, None] + half * points).ravel()
        shift = nodes[:, None] - self.nodes
        density = np.exp(-(shift**2) / (2 * step)) @ self.masses / math.sqrt(2 * math.pi * step)
        return _State(self.fraction + step, nodes, density * np.tile(half * weights, panels))
