"""Retry policy of range reads: backoff with jitter after failures, hedging of slow requests."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from etude.common.blobs.store import StoreRefusedError
from etude.common.errors import StoreError


class TransferLimits(NamedTuple):
    """Limits of one transfer of many ranges."""

    at_once: int = 8
    """Concurrent ranges: the memory in use is this times the largest range."""
    retries_per_range: int = 5
    retries_per_transfer: int = 64
    """Of all ranges together: a store that fails everything is soon asked no more."""
    hedges_per_range_asked: float = 0.1
    """Second requests, as a share: when everything is slow, they must not double the load."""


class Timing(NamedTuple):
    """Duration of one range's read."""

    length: int
    seconds: float


HEDGE_QUANTILE = 0.95
HEDGE_SAMPLES = 16
"""Fewer answers say nothing about a slowest twentieth."""
HEDGE_FLOOR_S = 0.05
"""A second request costs a round trip: nothing is won by sending it earlier."""
RECENT = 64
"""Answers remembered: old ones describe another load."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


def may_retry(error: Exception, *, failures: int, retries: int, pace: TransferLimits) -> bool:
    """Return true if a range that failed `failures` times is read again.

    Args:
        error: of the last attempt.
        failures: of this range, that one included.
        retries: of the whole transfer so far.
        pace: the limits.
    """
    return (
        isinstance(error, StoreError)
        and not isinstance(error, StoreRefusedError)
        and failures <= pace.retries_per_range
        and retries < pace.retries_per_transfer
    )


def pause_s(failures: int, chance: float) -> float:
    """Pause in seconds after a number of failures in a row, for a chance in [0, 1).

    Anywhere between nothing and a bound that doubles ("full jitter"), so that clients that failed
    together do not come back together.

    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
    """
    return chance * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1))


def hedge_after_s(recent: Sequence[Timing], length: int) -> float | None:
    """The age at which a range gets a second request, or None while nothing can be said.

    It is the 95th percentile of recent answers that were at least half as long (shorter ones are
    faster for no merit of the store), and never less than HEDGE_FLOOR_S.

    Source: Dean and Barroso, The Tail at Scale, https://doi.org/10.1145/2408776.2408794.
    """
    alike = sorted(seconds for size, seconds in recent if 2 * size >= length)
    if len(alike) < HEDGE_SAMPLES:
        return None
    return max(HEDGE_FLOOR_S, alike[math.ceil(HEDGE_QUANTILE * len(alike)) - 1])


def may_hedge(*, hedges: int, asked: int, pace: TransferLimits) -> bool:
    """Return true if a transfer that asked for `asked` ranges may send one more hedge."""
    return hedges < 1 + pace.hedges_per_range_asked * asked
