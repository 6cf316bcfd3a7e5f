"""Reciprocal rank fusion of several orders into one.

    fused(d) = Σ_r 1 / (60 + rank_r(d))

Source: Cormack, Clarke, Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
Learning Methods" (SIGIR 2009).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

K = 60
_PER_UNIT = 10_000
"""Scores are compared in steps of 1e-4, below which two CPUs may differ."""

Scores = NDArray[np.float64]
Places = NDArray[np.int64]


def order(scores: Scores, places: Places) -> Places:
    """Documents with a score above 0, best first; equal ones by their place.  [N], [N] -> [M]."""
    steps = np.rint(scores * _PER_UNIT).astype(np.int64)
    ordered = np.lexsort((places, -steps))
    found: Places = ordered[steps[ordered] > 0]
    return found


def fused(orders: Sequence[Places], places: Places, limit: int) -> Places:
    """The best documents of all orders, best first; equal ones by their place."""
    totals = np.zeros(len(places))
    for each in orders:
        totals[each] += 1 / (K + np.arange(1, len(each) + 1))
    ordered = np.lexsort((places, -totals))
    found: Places = ordered[totals[ordered] > 0][:limit]
    return found
