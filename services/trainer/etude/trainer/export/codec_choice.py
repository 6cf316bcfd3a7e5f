"""Codec choice: the measured upload rate decides between L1 and the denser L2r."""

from dataclasses import dataclass

from etude.common.weights.coding.codecs.ids import Codec

CODECS = {"L1": Codec.L1, "L2": Codec.L2, "L2r": Codec.L2R}

SLOW_BYTES_PER_S = 1.5e6
"""Below it L2r pays off: one core codes and applies a delta as much slower than with L1 as
sending it is faster (by bench/weights.py at 1.0 to 2.2 MB/s, where 1 to 15 % change)."""

FAST_BYTES_PER_S = 3.0e6
"""Above it L1 is used again: a rate near the limit must not toggle the codec."""

LEAST_BYTES = 4 << 20
"""Smaller uploads measure the latency of a request, not the rate."""

MOST_UNMEASURED = 64
"""Smaller uploads in a row after which the measured rate is discarded."""

_NEWEST = 0.3
"""Weight of the newest upload in the smoothed rate."""

_STALLED = 4.0
"""An upload counts as at most this many times slower than those before: it may have stalled."""


@dataclass(slots=True)
class UplinkMeter:
    """Smoothed upload rate of this rank to the object store."""

    _seconds_per_byte: float | None = None
    _is_slow: bool = False
    _unmeasured: int = 0

    def record_upload(self, num_bytes: int, seconds: float) -> None:
        if num_bytes < LEAST_BYTES:
            self._unmeasured += 1
            if self._unmeasured > MOST_UNMEASURED:
                self._seconds_per_byte, self._is_slow = None, False
            return
        self._unmeasured = 0
        found, before = seconds / num_bytes, self._seconds_per_byte
        if before is not None:
            found = (1 - _NEWEST) * before + _NEWEST * min(found, _STALLED * before)
        self._seconds_per_byte = found
        limit = FAST_BYTES_PER_S if self._is_slow else SLOW_BYTES_PER_S
        self._is_slow = found * limit > 1

    def choose_codec(self, wanted: str) -> Codec:
        """Choose the codec of the next version.

        Args:
            wanted: `spec.weights.advanced.codec`; Auto decides by the upload rate.
        """
        if wanted != "Auto":
            return CODECS[wanted]
        return Codec.L2R if self._is_slow else Codec.L1
