"""Coder of one block: by the chosen codec, or by all words where most of them change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from etude.common.weights.coding.codecs import dense, dense_delta, l1, l2, xor
from etude.common.weights.coding.codecs.ids import WHOLE_TENSOR, Codec, Encoded
from etude.common.weights.replicas.block_layout import BlockLayout
from etude.common.weights.tensors.changes import BlockChanges
from etude.common.weights.tensors.tiles import Tiling
from etude.common.weights.tensors.words import Words
from etude.trainer.export.tile_grouping import Shard, TileRange

BlockWords = Callable[[int, int, int], Words]
"""The new words of elements [lo, hi) of a tile: called with tile, lo, hi from other threads."""

MAX_DENSITY = 0.25
"""Above, how far every word moved takes less than the places of those that did."""
_WORTH_COMPARING = 0.6
"""Words of weights compress to more than this: only what is larger is compared with them."""
_L2_BYTES = 4
"""Widest words that L2 codes."""


class CodedBlock(NamedTuple):
    """A block, ready for a container."""

    tensor: int
    piece: TileRange
    changed: int
    codec: Codec
    encoded: Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCoder:
    """The settings by which blocks of a schema are coded."""

    layout: BlockLayout
    codec: Codec
    compress: bool

    def changed(
        self, tensor: int, at: TileRange, changes: BlockChanges, old: Words, block_words: BlockWords
    ) -> CodedBlock:
        """A block by its changes, whose old words are given.  k changes, [k]."""
        size, count = at.hi - at.lo, changes.index.size
        is_dense = count > MAX_DENSITY * size
        if self.codec is Codec.DENSE or (is_dense and not self.compress):
            return self.dense(tensor, at, count, block_words)
        if is_dense or self.codec is Codec.DENSE_DELTA:
            moves = dense_delta.encode(changes, elements=size)
            coded = CodedBlock(tensor, at, count, Codec.DENSE_DELTA, moves)
        else:
            coded = self._coded(tensor, at, changes, old, block_words)
        if len(coded.encoded.payload) < _WORTH_COMPARING * size * old.dtype.itemsize:
            return coded
        whole = self.dense(tensor, at, count, block_words)
        return min(coded, whole, key=lambda block: len(block.encoded.payload))

    def dense(
        self, tensor: int, at: TileRange, changed: int, block_words: BlockWords
    ) -> CodedBlock:
        """A block by its new words."""
        encoded = dense.encode(block_words(*at), compress=self.compress)
        return CodedBlock(tensor, at, changed, Codec.DENSE, encoded)

    def _coded(
        self, tensor: int, at: TileRange, changes: BlockChanges, old: Words, block_words: BlockWords
    ) -> CodedBlock:
        count = changes.index.size
        is_whole = at.hi - at.lo == self.layout.elements(tensor, at.tile)
        if self.codec is Codec.L1 or not is_whole or old.dtype.itemsize > _L2_BYTES:
            encoded = l1.encode(changes)
            return CodedBlock(tensor, at, count, Codec.L1, encoded)
        before = np.array(block_words(*at))
        before[changes.index] = old
        dtype = self.layout.schema.tensors[tensor].dtype
        what: l2.What = "rans" if self.codec is Codec.L2R else "rice"
        encoded = l2.encode(before, changes, dtype=dtype, what=what)
        return CodedBlock(tensor, at, count, self.codec, encoded)


def baseline(tensor: int, shard: Shard, changes: BlockChanges) -> CodedBlock:
    """A whole shard as XOR and zstd; the differences are old XOR new."""
    encoded = xor.encode(changes, elements=shard.stop - shard.start)
    at = TileRange(WHOLE_TENSOR, shard.start, shard.stop)
    return CodedBlock(tensor, at, changes.index.size, Codec.XOR_ZSTD, encoded)


def shard_words(words: Words, shard: Shard, tiling: Tiling) -> BlockWords:
    """Blocks cut out of a shard's words.  [stop - start]."""
    plane = tiling.rows * tiling.columns

    def block_words(number: int, lo: int, hi: int) -> Words:
        tile = tiling.tile(number)
        first = tile.plane * plane + tile.row * tiling.columns + tile.column - shard.start
        if tiling.is_contiguous():
            return words[first + lo : first + hi]
        rows, columns = np.divmod(np.arange(lo, hi), tile.columns)
        cut: Words = words[first + rows * tiling.columns + columns]
        return cut

    return block_words
