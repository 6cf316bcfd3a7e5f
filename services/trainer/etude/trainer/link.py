"""How fast uploads are, and which codec that asks for."""

from dataclasses import dataclass

from etude.common.weights.coding.codecs.ids import Codec

CODECS = {"L1": Codec.L1, "L2": Codec.L2, "L2r": Codec.L2R}

SLOW_BYTES_PER_S = 1.5e6
"""Below it L2r is worth its time: one core codes and applies a delta as much slower than with L1 as
sending it is faster (by bench/weights.py at 1.0 to 2.2 MB/s, where 1 to 15 % change)."""

FAST_BYTES_PER_S = 3.0e6
"""Above it L1 is taken again: a rate near the limit must not change the codec back and forth."""

LEAST_BYTES = 256 << 10
"""Smaller uploads say how long a request takes, not how fast bytes go."""

_NEWEST = 0.3
"""Weight of the newest upload in the smoothed rate."""


@dataclass(slots=True)
class Link:
    """To the object store, as this rank's uploads found it."""

    _bytes_per_s: float | None = None
    _is_slow: bool = False

    def uploaded(self, num_bytes: int, seconds: float) -> None:
        """Take in how long an upload took that ended well."""
        if num_bytes < LEAST_BYTES:
            return
        found, before = num_bytes / max(seconds, 1e-9), self._bytes_per_s
        # The mean of times per byte, so that one fast upload does not hide slow ones.
        self._bytes_per_s = (
            found if before is None else 1 / ((1 - _NEWEST) / before + _NEWEST / found)
        )
        limit = FAST_BYTES_PER_S if self._is_slow else SLOW_BYTES_PER_S
        self._is_slow = self._bytes_per_s < limit

    def codec(self, wanted: str) -> Codec:
        """The codec of the next version.

        Args:
            wanted: `spec.weights.advanced.codec`; Auto leaves it to the link.
        """
        if wanted != "Auto":
            return CODECS[wanted]
        return Codec.L2R if self._is_slow else Codec.L1
