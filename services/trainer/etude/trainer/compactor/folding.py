"""Delta folding: the first old value of every element that several versions changed.

The values are in mapped files, so that a window costs disk and no memory: at most as much as the
model, and a bit for each element.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude.common.weights.protocol.manifest import VersionRef
from etude.common.weights.protocol.plan import Edge
from etude.common.weights.replicas.patches import PreparedPatches
from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import Indices, Words, word_type
from etude.trainer.compactor.schedule import strides_at
from etude.trainer.export.tile_grouping import Shard
from etude.trainer.export.touched import MOST_TOUCHED, Flat, TouchedElements

_ALIGNMENT = 64

Bits = npt.NDArray[np.uint8]


class FoldWindow:
    """Changes from one base version on."""

    def __init__(self, base: VersionRef, schema: Schema, folder: Path) -> None:
        """Start an empty window; the folder must be its own."""
        self.base = base
        self.schema = schema
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        specs = schema.tensors
        words = _map_zeros(folder / "old", [spec.num_bytes for spec in specs])
        self._old = [w.view(word_type(s.dtype)) for w, s in zip(words, specs, strict=True)]
        self._bits = _map_zeros(folder / "touched", [-(-spec.elements // 8) for spec in specs])
        self._counts = [0] * len(specs)
        self._most = int(MOST_TOUCHED * sum(spec.elements for spec in specs))

    @property
    def is_worthwhile(self) -> bool:
        """True while few enough elements were touched."""
        return sum(self._counts) <= self._most

    @property
    def touched_counts(self) -> list[int]:
        """Number of touched elements by tensor."""
        return list(self._counts)

    def touch(self, prepared: PreparedPatches) -> None:
        """Keep the old values of elements that are about to be overwritten for the first time."""
        for patch in prepared.patches:
            tensor = self.schema.index[patch.parameter]
            bits, kept = self._bits[tensor], self._old[tensor]
            at, old = readonly(patch.word_positions), readonly(patch.old)
            self._counts[tensor] += int(_touch(bits, kept, np.int64(patch.base), at, old))

    def touched_in(self, tensor: int, shard: Shard) -> TouchedElements:
        bits = self._bits[tensor]
        flat = np.empty(_count(bits, shard.start, shard.stop), np.int64)
        _list(bits, shard.start, flat)
        return TouchedElements(flat, self._old[tensor][flat])

    def close(self) -> None:
        """Free the disk space; the window cannot be used afterwards."""
        self._old, self._bits = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(slots=True)
class FoldWindows:
    """One window for each stride, for as long as the versions form a chain."""

    strides: tuple[int, ...]
    folder: Path
    at: VersionRef | None = None
    """Version at the end of the chain."""
    _open: dict[int, FoldWindow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier process

    def touch(self, edge: Edge, prepared: PreparedPatches) -> None:
        """Record an edge before it overwrites the words of the copy."""
        if self.at is None or edge.base is None or edge.base.state != self.at.state:
            self.close_all()
        for stride, window in list(self._open.items()):
            window.touch(prepared)
            if not window.is_worthwhile:
                self._open.pop(stride).close()
        self.at = edge.target

    def closing_windows(self, ref: VersionRef) -> Iterator[FoldWindow]:
        """The windows that end at the copy's version; open the next ones afterwards."""
        if self.at is None or self.at.state != ref.state:
            self.close_all()
        self.at = ref
        due = strides_at(ref.number, self.strides)
        yield from (window for stride, window in self._open.items() if stride in due)

    def open_windows(self, ref: VersionRef, schema: Schema) -> None:
        """Open the windows that begin at this version."""
        for stride in strides_at(ref.number, self.strides):
            if stride in self._open:
                self._open.pop(stride).close()
            self._open[stride] = FoldWindow(ref, schema, self.folder / str(stride))
        self.at = ref

    def close_all(self) -> None:
        """Close all windows: the chain is broken."""
        for window in self._open.values():
            window.close()
        self._open.clear()
        self.at = None


def _map_zeros(path: Path, sizes: Sequence[int]) -> list[Bits]:
    """Map zeroed memory for every size in one sparse file."""
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    *starts, total = accumulate(padded, initial=0)
    with path.open("wb") as file:
        file.truncate(max(total, _ALIGNMENT))
    memory = np.asarray(np.memmap(path, np.uint8, "r+"))
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]


@compiled
def _touch(bits: Bits, kept: Words, base: np.int64, at: Indices, old: Words) -> int:
    """Keep each old word whose bit is not set yet; return their count."""
    fresh = 0
    for i in range(at.size):
        flat = base + np.int64(at[i])
        mask = np.uint8(1 << (flat & 7))
        if not bits[flat >> 3] & mask:
            bits[flat >> 3] |= mask
            kept[flat] = old[i]
            fresh += 1
    return fresh


@compiled
def _count(bits: Bits, start: int, stop: int) -> int:
    """Count the bits that are set in [start, stop)."""
    count = 0
    flat = start
    while flat < stop:
        if flat & 7 == 0 and not bits[flat >> 3]:
            flat += 8
            continue
        if bits[flat >> 3] >> (flat & 7) & 1:
            count += 1
        flat += 1
    return count


@compiled
def _list(bits: Bits, start: int, flats: Flat) -> None:
    """List the first bits that are set at or after start, as many as fit."""
    count = 0
    flat = start
    while count < flats.size:
        if flat & 7 == 0 and not bits[flat >> 3]:
            flat += 8
            continue
        if bits[flat >> 3] >> (flat & 7) & 1:
            flats[count] = flat
            count += 1
        flat += 1
