"""Shards: the elements of the checkpoint that one rank publishes, and their place in its memory."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from etude.common.weights.tensors.changes import changed_places
from etude.common.weights.tensors.tiles import Tiling
from etude.common.weights.tensors.words import Words, word_type
from etude.trainer.export.change_tracker import Changes, OldShard
from etude.trainer.export.touched import Flat, TouchedElements
from etude.trainer.model import tensor_bits
from etude.trainer.model.checkpoint_layout import CheckpointLayout
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import local_shard


class HeldRun(NamedTuple):
    """Consecutive elements of one source on this rank."""

    source: str
    start: int
    """In the rank's shard of the source, row-major."""
    length: int


class ShardPart(NamedTuple):
    """Consecutive elements of one tensor of the checkpoint that this rank publishes."""

    tensor: int
    """Its place in the schema."""
    start: int
    """Row-major."""
    stop: int
    held: tuple[HeldRun, ...]
    """Their runs in the rank's memory, in this order."""


class ShardEdits(NamedTuple):
    """Changed elements of a part; all of one length."""

    flat: Flat
    """Row-major in the tensor, increasing."""
    old: Words
    new: Words


def published_parts(
    layout: CheckpointLayout, ranges: Mapping[str, tuple[int, int]]
) -> list[ShardPart]:
    """Map a rank's shards to parts of checkpoint tensors, sorted by tensor and position.

    Args:
        layout: of the whole model.
        ranges: first element and end of the rank's shard of each source, row-major.
    """
    found: dict[int, list[tuple[int, HeldRun]]] = defaultdict(list)
    for source, pieces in layout.pieces.items():
        first, end = ranges[source]
        for piece in pieces:
            start, stop = max(first, piece.start), min(end, piece.start + piece.length)
            if start < stop:
                held = HeldRun(source, start - first, stop - start)
                place = layout.schema.index[piece.tensor]
                found[place].append((piece.first + start - piece.start, held))
    parts: list[ShardPart] = []
    for tensor in sorted(found):
        for place, held in sorted(found[tensor]):
            last = parts[-1] if parts else None
            if last is not None and (last.tensor, last.stop) == (tensor, place):
                parts[-1] = last._replace(stop=place + held.length, held=(*last.held, held))
            else:
                parts.append(ShardPart(tensor, place, place + held.length, (held,)))
    return parts


def shard_ranges(sources: Mapping[str, Tensor], ranks: RankGroup) -> dict[str, tuple[int, int]]:
    """First element and end of this rank's shard of each tensor, row-major.

    Rank 0 publishes the tensors that every rank holds completely.

    Raises:
        ValueError: a tensor is not sharded along its first dimension alone.
    """
    return {name: _range(name, tensor, ranks) for name, tensor in sources.items()}


def _range(name: str, tensor: Tensor, ranks: RankGroup) -> tuple[int, int]:
    if not isinstance(tensor, DTensor):
        return (0, tensor.numel()) if ranks.is_first else (0, 0)
    if tuple(tensor.placements) != (Shard(0),):
        raise ValueError(f"{name} is spread as {tensor.placements}, not along its first dimension")
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    row = int(np.prod(tensor.shape[1:]))
    if not shape[0]:
        return (0, 0)
    return offset[0] * row, (offset[0] + shape[0]) * row


class LiveShard(NamedTuple):
    """The live weights of this rank, read in the published dtype."""

    sources: Mapping[str, Tensor]
    dtype: tensor_bits.Dtype

    def read_words(self, part: ShardPart) -> Words:
        found = [self._run_words(held) for held in part.held]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def changed_elements(self, part: ShardPart, changes: Changes) -> ShardEdits | None:
        """Find the elements of a part that differ from the base; None if they are not listed."""
        found = [self._run_edits(held, changes) for held in part.held]
        if any(each is None for each in found):
            return None
        flat, old, new = [], [], []
        place = part.start
        for held, each in zip(part.held, found, strict=True):
            if each is not None and each.flat.size:
                flat.append(each.flat + (place - held.start))
                old.append(each.old)
                new.append(each.new)
            place += held.length
        if not flat:
            return _NO_EDITS
        return ShardEdits(np.concatenate(flat), np.concatenate(old), np.concatenate(new))

    def read_elements(self, part: ShardPart, flat: Flat) -> Words:
        """Read single elements of a part by their position in the tensor. [k] -> [k]."""
        dtype = tensor_bits.wire_dtype(self.sources[part.held[0].source], dtype=self.dtype)
        found = np.empty(flat.size, word_type(tensor_bits.NAMES[dtype]))
        place = part.start
        for held in part.held:
            chosen = (flat >= place) & (flat < place + held.length)
            found[chosen] = self._read_run_elements(held, flat[chosen] - (place - held.start))
            place += held.length
        return found

    def _read_run_elements(self, held: HeldRun, flat: Flat) -> Words:
        """Read single elements by their position in the rank's shard of the source. [k] -> [k]."""
        tensor = self.sources[held.source]
        shard = local_shard(tensor.detach()).reshape(-1)
        values = shard[torch.from_numpy(flat).to(shard.device)]
        return tensor_bits.to_words(values, dtype=tensor_bits.wire_dtype(tensor, dtype=self.dtype))

    def _run_edits(self, held: HeldRun, changes: Changes) -> ShardEdits | None:
        """Find the changed elements of one run, by their position in the rank's shard."""
        touched = changes.get(held.source, _UNTOUCHED)
        if touched is None:
            return None
        if isinstance(touched, OldShard):
            return self._compare_run(held, touched)
        low, high = np.searchsorted(touched.flat, (held.start, held.start + held.length))
        flat, old = touched.flat[low:high], touched.old[low:high]
        if not flat.size:
            return _NO_EDITS
        new = self._read_run_elements(held, flat)
        # A later step may have reverted an earlier one.
        differs = old != new
        return ShardEdits(flat[differs], old[differs], new[differs])

    def _compare_run(self, held: HeldRun, whole: OldShard) -> ShardEdits:
        """Find the changed elements of one run whose old words are all known."""
        old, new = whole.old[held.start : held.start + held.length], self._run_words(held)
        places = changed_places(old, new)
        return ShardEdits(places + held.start, old[places], new[places])

    def _run_words(self, held: HeldRun) -> Words:
        tensor = self.sources[held.source]
        run = local_shard(tensor.detach()).reshape(-1)[held.start : held.start + held.length]
        return tensor_bits.to_words(run, dtype=tensor_bits.wire_dtype(tensor, dtype=self.dtype))


def tile_positions(cut: Tiling, tile: int, lo: int, hi: int) -> Flat:
    """Positions of elements [lo, hi) of a tile in their tensor, row-major."""
    at = cut.tile(tile)
    rows, columns = np.divmod(np.arange(lo, hi, dtype=np.int64), at.columns)
    flat: Flat = (at.plane * cut.rows + at.row + rows) * cut.columns + at.column + columns
    return flat


_UNTOUCHED = TouchedElements(np.empty(0, np.int64), np.empty(0, np.uint8))
_NO_EDITS = ShardEdits(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.uint8))
