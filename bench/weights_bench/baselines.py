"""How others move weights: XOR with zstd-1 (slime, MILES, stitch, SkyRL), raw index and value.

Both are written here without waste, in numpy, zstandard and one compiled loop: the ratios are
against these, not against other people's Python. The index is charged at one row of 24 bytes per
tensor, less than any of them stores.
"""

from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3
from typing_extensions import override

from etude.common.errors import CorruptError
from etude.common.weights.tensors.changes import changed_places
from etude.common.weights.tensors.words import Words
from weights_bench.contender import Contender, Receiver, Sent, copies, overwrite
from weights_bench.scatter import scatter
from weights_bench.trajectory import Trajectory

ROW_BYTES = 24
_Parts = list[tuple[npt.NDArray[np.int32], Words]]
Check = Literal["sum", "blake3"]
"""How the receiver checks the whole new state. Receivers use xxh3, which has no package here; a sum
of 8-byte words reads as much and computes less than any hash, so it cannot make them look slow."""


class XorZstd(Contender):
    """zstd-1 of old XOR new, per tensor; the receiver keeps a host copy and reloads all of it."""

    standing_at_sender = 1.0

    def __init__(self, check: Check = "sum") -> None:
        self.name = "XOR + zstd-1" if check == "sum" else "XOR + zstd-1, BLAKE3"
        self._check: Check = check

    @override
    def send(self, trajectory: Trajectory) -> Sent:
        compressor = zstandard.ZstdCompressor(level=1)
        pairs = zip(trajectory.old, trajectory.new, strict=True)
        frames = [compressor.compress((old ^ new).data) for old, new in pairs]
        check = _checksum(trajectory.new, self._check)
        return Sent((frames, check), sum(map(len, frames)), ROW_BYTES * len(frames))

    @override
    def receiver(self, trajectory: Trajectory) -> "XorReceiver":
        return XorReceiver(trajectory, self._check)


class XorReceiver(Receiver):
    """Applies the difference to the host copy, checks all of that, and copies it over."""

    def __init__(self, trajectory: Trajectory, check: Check) -> None:
        self._old, self._check = trajectory.old, check
        self._live, self._host = copies(trajectory.old), copies(trajectory.old)
        self.standing_bytes = trajectory.num_bytes

    @override
    def reset(self) -> None:
        overwrite(self._live, self._old)
        overwrite(self._host, self._old)

    @override
    def stage(self, sent: Sent) -> object:
        frames, expected = sent.body
        decompressor = zstandard.ZstdDecompressor()
        for host, frame in zip(self._host, frames, strict=True):
            difference = decompressor.decompress(frame, max_output_size=host.nbytes)
            np.bitwise_xor(host, np.frombuffer(difference, host.dtype), out=host)
        if _checksum(self._host, self._check) != expected:
            raise CorruptError("the new state does not match its checksum")
        return self._host

    @override
    def commit(self, staged: object) -> None:
        overwrite(self._live, self._host)

    @override
    def live(self) -> tuple[Words, ...]:
        return self._live


def _checksum(state: tuple[Words, ...], check: Check) -> object:
    if check == "blake3":
        hasher = blake3()
        for words in state:
            hasher.update(words.view(np.uint8).data)
        return hasher.digest()
    return [int(_wide(words).sum(dtype=np.uint64)) for words in state]


def _wide(words: Words) -> Words:
    return words if words.nbytes % 8 else words.view(np.uint64)


class IndexValue(Contender):
    """int32 place and new value of each change (TRL, vLLM, verl); scattered straight into place."""

    name = "int32 index + value"
    standing_at_sender = 0.0

    @override
    def send(self, trajectory: Trajectory) -> Sent:
        parts = []
        for old, new in zip(trajectory.old, trajectory.new, strict=True):
            places = changed_places(old, new)
            parts.append((places.astype(np.int32), new[places]))
        size = sum(places.nbytes + values.nbytes for places, values in parts)
        return Sent(parts, size, ROW_BYTES * len(parts))

    @override
    def receiver(self, trajectory: Trajectory) -> "IndexValueReceiver":
        return IndexValueReceiver(trajectory)


class IndexValueReceiver(Receiver):
    """Checks nothing and can undo nothing, as its models."""

    standing_bytes = 0

    def __init__(self, trajectory: Trajectory) -> None:
        self._old, self._live = trajectory.old, copies(trajectory.old)

    @override
    def reset(self) -> None:
        overwrite(self._live, self._old)

    @override
    def stage(self, sent: Sent) -> object:
        return sent.body

    @override
    def commit(self, staged: object) -> None:
        for live, (places, values) in zip(self._live, cast("_Parts", staged), strict=True):
            scatter(live, places, values)

    @override
    def live(self) -> tuple[Words, ...]:
        return self._live
