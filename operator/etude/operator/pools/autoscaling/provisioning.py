"""Provisioning time of replicas, estimated from the newest ones."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from etude.common.plans.forecast import Assurance

MAX_SAMPLES = 500
"""Newest provisions that say something: images and machines change. Of those that are begun
together the slowest come last, so these have to be more than a wave."""
PRIOR_WEIGHT = 5
"""Samples that the prior counts for."""


class ProvisionTime(NamedTuple):
    """Quantiles of the time from a replica's creation until it takes leases."""

    p50_s: float
    p95_s: float
    failing: float = 0.0
    """Share of replicas that never become ready."""

    @property
    def punctual_share(self) -> float:
        """Share of replicas that take leases by the 95th percentile of those that do."""
        return 0.95 * (1 - self.failing)


PRIOR = ProvisionTime(30.0, 60.0)
"""Assumed for pools without samples."""


def estimate_provision(
    took_s: Sequence[float | None], prior: ProvisionTime = PRIOR
) -> ProvisionTime:
    """Quantiles of the newest samples, shrunk towards the prior while they are few.

    Args:
        took_s: seconds of each, the newest last; None of those that failed.
        prior: that of all pools, or of the whole pool for one of its templates.
    """
    newest = took_s[-MAX_SAMPLES:]
    done = sorted(each for each in newest if each is not None)
    failing = (len(newest) - len(done) + PRIOR_WEIGHT * prior.failing) / (
        len(newest) + PRIOR_WEIGHT
    )
    weight = PRIOR_WEIGHT / (PRIOR_WEIGHT + len(done))

    def shrunk(share: float, assumed_s: float) -> float:
        seen_s = done[math.floor(share * len(done))] if done else assumed_s
        return weight * assumed_s + (1 - weight) * seen_s

    return ProvisionTime(shrunk(0.5, prior.p50_s), shrunk(0.95, prior.p95_s), failing)


def add_first_start(took: ProvisionTime, p50_s: float, p95_s: float, count: int) -> ProvisionTime:
    """Provisioning time plus the first start on a replica, weighted by its samples.

    Args:
        took: until the replica is ready.
        p50_s: what half of the replicas stay below after that.
        p95_s: what nineteen of twenty stay below; both late is rarer, so the sum is cautious.
        count: replicas that this was learnt from.
    """
    weight = count / (PRIOR_WEIGHT + count)
    return took._replace(p50_s=took.p50_s + weight * p50_s, p95_s=took.p95_s + weight * p95_s)


def with_spares(wanted: int, ready: int, took: ProvisionTime, enough: Assurance) -> int:
    """Replicas to create so that the desired number is ready in time.

    A client that waits for a whole wave waits for its slowest replica, and for those that must be
    created again. So more are created, by the normal approximation of a binomial distribution; the
    number falls to the desired one as they get ready.
    """
    missing, share = wanted - ready, took.punctual_share
    if missing <= 0 or share <= 0:
        return wanted
    spare = enough.deviations * math.sqrt(missing * (1 - share))
    return ready + math.ceil((missing + spare) / share)
