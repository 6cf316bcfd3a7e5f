"""How long replicas take to be ready, from those that became so of late."""

import math
from collections.abc import Sequence
from typing import NamedTuple

KEPT = 100
"""Newest provisions that say something; images and machines change."""
PRIOR_WEIGHT = 5
"""Provisions that what was assumed beforehand counts for."""


class Provision(NamedTuple):
    """How long a replica takes from its creation to its first lease."""

    p50_s: float
    p95_s: float


PRIOR = Provision(30.0, 60.0)
"""Of pools that never provisioned anything."""


def provision(took_s: Sequence[float], prior: Provision = PRIOR) -> Provision:
    """Quantiles of the newest provisions, drawn towards what was assumed while they are few.

    Args:
        took_s: seconds of each, the newest last.
        prior: that of all pools, or of the whole pool for one of its templates.
    """
    newest = sorted(took_s[-KEPT:])
    if not newest:
        return prior
    weight = PRIOR_WEIGHT / (PRIOR_WEIGHT + len(newest))

    def shrunk(share: float, assumed_s: float) -> float:
        seen_s = newest[min(len(newest) - 1, math.floor(share * len(newest)))]
        return weight * assumed_s + (1 - weight) * seen_s

    return Provision(shrunk(0.5, prior.p50_s), shrunk(0.95, prior.p95_s))
