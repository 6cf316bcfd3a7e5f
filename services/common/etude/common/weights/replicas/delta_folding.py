"""Folding of the deltas of consecutive versions into one, for readers without the words between."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.errors import EtudeError
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors import ulp
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import Words


class UnfoldableError(EtudeError):
    """Deltas can be decoded only with the words of a version between them."""


def fold_deltas(versions: Sequence[Sequence[StagedBlock]], schema: Schema) -> Iterator[StagedBlock]:
    """Fold the deltas of consecutive versions into one, without the words that they change.

    Differences on the ulp axis add up, those of the baseline codec by exclusive or; new words take
    the place of what was before.

    Args:
        versions: blocks of each delta, in the order of the versions.
        schema: of all of them.

    Raises:
        UnfoldableError: a block is not decoded, or of another kind than the one before.
    """
    tiles: dict[tuple[int, int], list[StagedBlock]] = {}
    for block in itertools.chain.from_iterable(versions):
        tiles.setdefault((block.tensor, block.tile), []).append(block)
    for (tensor, _), blocks in sorted(tiles.items()):
        yield from _fold_tile(blocks, is_ordered=schema.tensors[tensor].is_ordered)


def _fold_tile(blocks: Sequence[StagedBlock], *, is_ordered: bool) -> Iterator[StagedBlock]:
    tensor, tile = blocks[0].tensor, blocks[0].tile
    lo, hi = min(block.lo for block in blocks), max(block.hi for block in blocks)
    kinds = {block.codec is Codec.XOR_ZSTD for block in blocks if block.index is not None}
    if len(kinds) > 1:
        raise UnfoldableError("the differences of two deltas are of two kinds")
    is_xor = True in kinds
    moves = _Moves.of_size(hi - lo, blocks[0])
    for block in blocks:
        moves.add(block, lo, is_xor=is_xor)
    for start, stop in itertools.pairwise(moves.bounds()):
        at = (tensor, tile, lo + start, lo + stop)
        by, new = moves.total[start:stop], moves.words[start:stop]
        index = np.flatnonzero(by).astype(np.uint32)
        if moves.is_new[start]:
            words = new ^ by if is_xor else ulp.add_ulps(new, by, ordered=is_ordered)
            yield StagedBlock(*at, Codec.DENSE, None, words)
        elif index.size:
            codec = Codec.XOR_ZSTD if is_xor else Codec.L1
            yield StagedBlock(*at, codec, index, by[index])


class _Moves(NamedTuple):
    """Changes of some elements of a tile.  n elements, each [n]."""

    total: Words
    """Difference since the first version, or since the new word."""
    words: Words
    """New words."""
    is_new: npt.NDArray[np.bool_]
    """True where a new word is given."""

    @classmethod
    def of_size(cls, size: int, block: StagedBlock) -> "_Moves":
        """No changes of elements such as a block's."""
        word = np.uint64 if block.data is None else block.data.dtype
        return cls(np.zeros(size, word), np.zeros(size, word), np.zeros(size, np.bool_))

    def add(self, block: StagedBlock, lo: int, *, is_xor: bool) -> None:
        """Add a later version's block; the first element lies at `lo` of the tile.

        Raises:
            UnfoldableError: its codec needs the words before it.
        """
        if block.data is None:
            raise UnfoldableError(f"a block of {block.codec.name} is not decoded")
        places = block.element_places + np.uint32(block.lo - lo)
        if block.index is None:
            self.words[places], self.is_new[places], self.total[places] = block.data, True, 0
        else:
            before = self.total[places]
            self.total[places] = before ^ block.data if is_xor else before + block.data

    def bounds(self) -> list[int]:
        """Bounds of the ranges that have new words throughout, or none."""
        return [0, *(np.flatnonzero(np.diff(self.is_new)) + 1).tolist(), self.is_new.size]
