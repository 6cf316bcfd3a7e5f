"""From arrays to a container: which blocks a shard becomes, and how each is coded."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from etude.common.weights.coding import container
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.coding.container import Container
from etude.common.weights.replicas.block_layout import BlockLayout
from etude.common.weights.tensors import digest, ulp
from etude.common.weights.tensors.changes import BlockChanges
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.words import Words, word_type
from etude.trainer.export import block_coder as coding
from etude.trainer.export.block_coder import BlockCoder, BlockWords, CodedBlock, shard_words
from etude.trainer.export.tile_grouping import (
    GroupedChanges,
    Shard,
    group_by_tile,
    tile_range,
    tile_ranges,
)

__all__ = ["BlockWords", "PackStats", "PackedContainer", "Packer", "Shard", "shard_words"]

_BATCH = 16
"""Blocks of one task: enough to make the hand-over to a thread cheap."""
_NONFINITE = {
    "BF16": 0x7F80,
    "F16": 0x7C00,
    "F32": 0x7F80_0000,
    "F64": 0x7FF0_0000_0000_0000,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,
}
"""Bits that are all set in infinities and NaNs, and in no other word."""


class PackStats(NamedTuple):
    """Statistics of a pack, for people and metrics."""

    changed: int
    elements: int
    """Of all shards that were added."""
    one_ulp: int
    """Changes to a neighbour."""
    nonfinite: int
    """New words that are infinite or no number."""
    codecs: dict[str, int]
    """Blocks by codec."""
    num_bytes: int
    """Size of the container."""


class PackedContainer(NamedTuple):
    """A container, and what its blocks do to the state digest."""

    container: Container
    digest: Digest
    """Sum of the changes; of a complete container, of the words themselves."""
    stats: PackStats


_Task = Callable[[], CodedBlock]


class Packer:
    """Packs the shards of one rank.

    Blocks are coded in threads while more are added: words and callables that were handed in must
    not change before finish() returns. Add each tensor's shard once, either changed or complete.
    """

    def __init__(
        self, schema: Schema, *, codec: Codec = Codec.L1, compress: bool = True, threads: int = 2
    ) -> None:
        self._layout = BlockLayout(schema)
        self._coder = BlockCoder(layout=self._layout, codec=codec, compress=compress)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pack")
        self._blocks: list[Future[list[CodedBlock]]] = []
        self._digest = digest.ZERO
        self._counts: Counter[str] = Counter()
        self._kinds: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop what was not finished."""
        self._pool.shutdown(cancel_futures=True)

    def add_changes(
        self,
        tensor: int,
        flat: npt.NDArray[np.int64],
        old: Words,
        new: Words,
        shard: Shard,
        *,
        block_words: BlockWords,
    ) -> None:
        """Pack what changed in a shard.

        Args:
            tensor: its place in the schema.
            flat: positions in the tensor, strictly increasing, inside the shard. [k]
            old: words before; none equals its new one. [k]
            new: words after. [k]
            shard: which elements of the tensor this rank publishes.
            block_words: gives new words of blocks that become dense, or need more than changes.

        Raises:
            ValueError: positions are not increasing inside the shard, or words of another type.
        """
        spec = self._checked(tensor, shard, old, new)
        if old.size != flat.size or not _is_increasing(flat, shard):
            raise ValueError(f"tensor {spec.name!r}: {flat.size} positions for {old.size} words")
        self._kinds.add(container.DELTA)
        self._counts["elements"] += shard.stop - shard.start
        if not flat.size:
            return
        by = ulp.delta(old, new, ordered=spec.is_ordered)
        minus_one = np.iinfo(by.dtype).max
        ones = np.count_nonzero((by == 1) | (by == minus_one))
        if np.count_nonzero(by) != by.size:
            raise ValueError(f"tensor {spec.name!r}: a change to the same word")
        self._digest = self._digest.plus(
            digest.change(old, new, flat, self._layout.schema.offsets[tensor])
        )
        self._counts["changed"] += flat.size
        self._counts["one_ulp"] += int(ones)
        self._counts["nonfinite"] += _nonfinite(new, spec.dtype)
        if self._coder.codec is Codec.XOR_ZSTD:
            whole = BlockChanges((flat - shard.start).astype(np.uint32), old ^ new)
            self._submit([partial(coding.baseline, tensor, shard, whole)])
            return
        found = group_by_tile(flat, self._layout.tiling(tensor))
        self._submit_blocks(tensor, found, (old, by), shard, block_words)

    def add_complete(self, tensor: int, words: Words, shard: Shard) -> None:
        """Pack every element of a shard.

        Args:
            tensor: its place in the schema.
            words: all words of the shard. [stop - start]
            shard: which elements of the tensor this rank publishes.

        Raises:
            ValueError: not as many words as the shard has, or of another type.
        """
        self._add_dense(tensor, words, shard, kind=container.COMPLETE)

    def add_replaced(self, tensor: int, words: Words, shard: Shard, *, before: Digest) -> None:
        """Pack every element of a shard into a delta: what changed in it is not known.

        Args:
            tensor: its place in the schema.
            words: all words of the shard. [stop - start]
            shard: which elements of the tensor this rank publishes.
            before: digest of the shard in the base.

        Raises:
            ValueError: not as many words as the shard has, or of another type.
        """
        self._add_dense(tensor, words, shard, kind=container.DELTA)
        self._digest = self._digest.minus(before)

    def _add_dense(self, tensor: int, words: Words, shard: Shard, *, kind: int) -> None:
        spec = self._checked(tensor, shard, words, words)
        if words.size != shard.stop - shard.start:
            raise ValueError(f"tensor {spec.name!r}: {words.size} words for {shard}")
        self._kinds.add(kind)
        lanes = spec.lanes // spec.elements if spec.elements else 1
        first_lane = self._layout.schema.offsets[tensor] + shard.start * lanes
        self._digest = self._digest.plus(digest.scan(words, first_lane))
        self._counts["elements"] += words.size
        self._counts["changed"] += words.size
        self._counts["nonfinite"] += _nonfinite(words, spec.dtype)
        if not words.size:
            return
        cut = self._layout.tiling(tensor)
        block_words = shard_words(words, shard, cut)
        self._submit(
            [
                partial(self._coder.dense, tensor, at, at.hi - at.lo, block_words)
                for at in tile_ranges(shard, cut)
            ]
        )

    def finish(self) -> PackedContainer:
        """Wait for all blocks and put them together.

        Raises:
            ValueError: some shards were added as changes, others complete.
        """
        if len(self._kinds) > 1:
            raise ValueError("a container has changes, or is complete; not both")
        done = [block for future in self._blocks for block in future.result()]
        blocks = sorted(done, key=lambda block: block[:2])
        self._pool.shutdown()
        writer = container.ContainerWriter(kind=next(iter(self._kinds), container.DELTA))
        for tensor, at, changed, codec, encoded in blocks:
            writer.add(tensor, *at, changed, codec, encoded)
        made = writer.finish()
        stats = PackStats(
            changed=self._counts["changed"],
            elements=self._counts["elements"],
            one_ulp=self._counts["one_ulp"],
            nonfinite=self._counts["nonfinite"],
            codecs=dict(Counter(block.codec.name for block in blocks)),
            num_bytes=made.size,
        )
        return PackedContainer(made, self._digest, stats)

    def _checked(self, tensor: int, shard: Shard, old: Words, new: Words) -> TensorSpec:
        spec = self._layout.schema.tensors[tensor]
        if not 0 <= shard.start <= shard.stop <= spec.elements:
            raise ValueError(f"tensor {spec.name!r}: {shard} of {spec.elements} elements")
        word = word_type(spec.dtype)
        if old.dtype != word or new.dtype != word or old.shape != new.shape or old.ndim != 1:
            raise ValueError(f"tensor {spec.name!r}: {old.dtype} and {new.dtype}, not flat {word}")
        return spec

    def _submit(self, tasks: list[_Task]) -> None:
        for start in range(0, len(tasks), _BATCH):
            batch = tasks[start : start + _BATCH]
            self._blocks.append(self._pool.submit(_all, batch))

    def _submit_blocks(
        self,
        tensor: int,
        found: GroupedChanges,
        words: tuple[Words, Words],
        shard: Shard,
        block_words: BlockWords,
    ) -> None:
        cut = self._layout.tiling(tensor)
        old, by = words if found.order is None else (part[found.order] for part in words)
        tasks: list[_Task] = []
        bounds = found.bounds.tolist()
        for place, tile in enumerate(found.tiles.tolist()):
            some = slice(bounds[place], bounds[place + 1])
            at = tile_range(tile, shard, cut)
            changes = BlockChanges(found.local[some] - np.uint32(at.lo), by[some])
            tasks.append(partial(self._coder.changed, tensor, at, changes, old[some], block_words))
        self._submit(tasks)


def _all(tasks: list[_Task]) -> list[CodedBlock]:
    return [task() for task in tasks]


def _is_increasing(flat: npt.NDArray[np.int64], shard: Shard) -> bool:
    if not flat.size:
        return True
    inside = shard.start <= flat[0] and flat[-1] < shard.stop
    return bool(inside and (flat[1:] > flat[:-1]).all())


def _nonfinite(words: Words, dtype: str) -> int:
    bits = _NONFINITE.get(dtype)
    if bits is None:
        return 0
    mask = words.dtype.type(bits)
    return int(np.count_nonzero((words & mask) == mask))
