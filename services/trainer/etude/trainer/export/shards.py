"""Shards: the elements of the checkpoint that one rank publishes, and their place in its memory."""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from etude.common.weights.tensors.changes import changed_places
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.tiles import Tiling
from etude.common.weights.tensors.words import Words, word_type
from etude.trainer.export.change_tracker import Changes, OldShard
from etude.trainer.export.touched import Flat, TouchedElements
from etude.trainer.model import checkpoint_layout, tensor_bits
from etude.trainer.model.checkpoint_layout import CheckpointLayout
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import local_shard
from etude.trainer.model.shard_runs import ShardRuns, owned_runs


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


def published_parts(layout: CheckpointLayout, shards: Mapping[str, ShardRuns]) -> list[ShardPart]:
    """Map a rank's shards to parts of checkpoint tensors, sorted by tensor and position.

    Args:
        layout: of the whole model.
        shards: what the rank publishes of each source.
    """
    found: dict[int, list[tuple[int, HeldRun]]] = defaultdict(list)
    for source, pieces in layout.pieces.items():
        for piece, place in checkpoint_layout.cut_pieces(pieces, shards[source]):
            held = HeldRun(source, place, piece.length)
            found[layout.schema.index[piece.tensor]].append((piece.first, held))
    parts: list[ShardPart] = []
    for tensor in sorted(found):
        for place, held in sorted(found[tensor]):
            last = parts[-1] if parts else None
            if last is not None and (last.tensor, last.stop) == (tensor, place):
                parts[-1] = last._replace(stop=place + held.length, held=(*last.held, held))
            else:
                parts.append(ShardPart(tensor, place, place + held.length, (held,)))
    return parts


def published_runs(sources: Mapping[str, Tensor], ranks: RankGroup) -> dict[str, ShardRuns]:
    """Runs of each tensor that this rank publishes: its shard, unless an earlier rank has it too.

    Raises:
        ValueError: a tensor has no shards; it is named.
    """
    found = {}
    for name, tensor in sources.items():
        try:
            found[name] = owned_runs(tensor, is_first_rank=ranks.is_first)
        except ValueError as cause:
            raise ValueError(f"{name}: {cause}") from cause
    return found


def coverage(parts: Iterable[ShardPart], schema: Schema, *, is_first_rank: bool) -> Digest:
    """Digest of the bounds of a rank's parts, less those of everything on rank 0.

    Over all ranks the digests add up to zero only if every element is in one part: then the end of
    each part is the start of another, or the end of everything.
    """
    tensors = (spec.elements for spec in schema.tensors)
    offsets = [0, *itertools.accumulate(tensors)]
    total = ZERO
    for part in parts:
        offset = offsets[part.tensor]
        total = total.plus(_bound(offset + part.stop)).minus(_bound(offset + part.start))
    return total.minus(_bound(offsets[-1])).plus(_bound(0)) if is_first_rank else total


def _bound(position: int) -> Digest:
    drawn = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=16).digest()
    return Digest(int.from_bytes(drawn[:8], "little"), int.from_bytes(drawn[8:], "little"))


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
