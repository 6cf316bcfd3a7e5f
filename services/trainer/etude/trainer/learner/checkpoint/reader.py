"""Reader of saved states: the blocks that hold this rank's elements, each verified."""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from etude.common.blobs import MissingError, Range, RangeReader, ShortReadError, Store
from etude.common.errors import CorruptError
from etude.common.weights.tensors.safetensors import ITEM_BYTES
from etude.trainer.learner.checkpoint.index import (
    MAX_BLOCK_BYTES,
    SavedState,
    ShardStream,
    StoredShard,
)
from etude.trainer.learner.checkpoint.shard_memory import ShardMemory
from etude.trainer.model.shard_runs import ShardRuns, intersect_runs, runs_of_intervals

READ_BYTES = MAX_BLOCK_BYTES
"""Longest range of one request."""

_READS_AT_ONCE = 8
"""Ranges of a file under one digest that are in memory together."""


class _ByteCopy(NamedTuple):
    """Bytes of a stream that go to consecutive places of the memory."""

    start: int
    """In the stream."""
    place: int
    """In the memory."""
    length: int


class _BlockRange(NamedTuple):
    """Consecutive blocks of one object."""

    stream: int
    start: int
    """First byte in the stream."""
    length: int


def read_shards(store: Store, saved: SavedState, memory: ShardMemory, *, where: str) -> None:
    """Fill memory with the elements of its shards, whichever ranks stored them.

    Only blocks that hold such elements are read, a bounded number of bytes at a time. After an
    error the memory's content is arbitrary.

    Raises:
        CorruptError: an object is missing or damaged, or an element was stored by no rank or by
            two.
        StoreError: the store failed.
    """
    target = memory.data.numpy()
    copies = [_plan_copies(stream, memory.shards) for stream in saved.streams]
    _check_coverage(copies, memory.shards, where=where)
    for piece, data in _read_verified(store, saved.streams, copies):
        for start, place, length in _cut(copies[piece.stream], piece):
            source = data[start - piece.start : start - piece.start + length]
            target[place : place + length] = np.frombuffer(source, np.uint8)


def verify_blocks(store: Store, saved: SavedState) -> None:
    """Read everything that was saved and compare it with the digests; nothing is kept.

    Raises:
        CorruptError: an object is missing or damaged.
        StoreError: the store failed.
    """
    every = [[_ByteCopy(0, 0, stream.size)] for stream in saved.streams]
    for _ in _read_verified(store, saved.streams, every):
        pass


def _plan_copies(stream: ShardStream, shards: Iterable[StoredShard]) -> list[_ByteCopy]:
    """Bytes of a stream that the shards need, in the order of the stream."""
    wanted = {shard.name: shard for shard in shards}
    copies: list[_ByteCopy] = []
    for stored in stream.shards:
        shard = wanted.get(stored.name)
        if shard is None or _are_disjoint(stored, shard):
            continue
        overlap = intersect_runs(_runs(stored), _runs(shard))
        item = ITEM_BYTES[stored.dtype]
        copies += [
            _ByteCopy(stored.offset + first * item, shard.offset + second * item, length * item)
            for first, second, length in zip(*(each.tolist() for each in overlap), strict=True)
        ]
    return sorted(copies)


def _are_disjoint(one: StoredShard, other: StoredShard) -> bool:
    """True if the bounds of two shards show that they have no element in common."""
    return any(
        not (a and b) or a[-1][1] <= b[0][0] or b[-1][1] <= a[0][0]
        for a, b in zip(one.intervals, other.intervals, strict=True)
    )


def _runs(shard: StoredShard) -> ShardRuns:
    return runs_of_intervals(shard.shape, shard.intervals)


def _check_coverage(
    copies: Sequence[Sequence[_ByteCopy]], shards: Iterable[StoredShard], *, where: str
) -> None:
    """Check that each element comes from one place.

    Raises:
        CorruptError: one comes from none, or from two.
    """
    places = sorted((copy.place, copy.length) for each in copies for copy in each)
    number = 0
    for shard in shards:
        end = shard.offset
        last = shard.offset + shard.num_bytes
        while number < len(places) and places[number][0] == end < last:
            end += places[number][1]
            number += 1
        if end != last or (number < len(places) and places[number][0] < last):
            raise CorruptError(f"{where}: tensor {shard.name!r} is not stored exactly once")


def _block_ranges(
    number: int, stream: ShardStream, copies: Iterable[_ByteCopy]
) -> Iterator[_BlockRange]:
    """Blocks that hold the bytes to copy; neighbours in one object are joined up to READ_BYTES."""
    size = stream.block_bytes
    first = after = 0
    """Of the blocks that were joined."""
    for block in _blocks(size, copies):
        joins = block == after and after % (stream.part_bytes // size) != 0
        if not joins or (after + 1 - first) * size > READ_BYTES:
            if first < after:
                yield _range_of_blocks(number, stream, first, after)
            first = block
        after = block + 1
    if first < after:
        yield _range_of_blocks(number, stream, first, after)


def _blocks(size: int, copies: Iterable[_ByteCopy]) -> Iterator[int]:
    """Numbers of the blocks that hold the bytes to copy, ascending."""
    after = 0
    for copy in copies:
        end = -(-(copy.start + copy.length) // size)
        yield from range(max(after, copy.start // size), end)
        after = max(after, end)


def _range_of_blocks(number: int, stream: ShardStream, first: int, after: int) -> _BlockRange:
    start = first * stream.block_bytes
    return _BlockRange(number, start, min(after * stream.block_bytes, stream.size) - start)


def _read_verified(
    store: Store, streams: Sequence[ShardStream], copies: Sequence[Sequence[_ByteCopy]]
) -> Iterator[tuple[_BlockRange, memoryview]]:
    """Read the blocks that hold the bytes to copy from each stream.

    Raises:
        CorruptError: an object is missing, too short or damaged.
    """
    short: list[Iterator[_BlockRange]] = []
    for number, stream in enumerate(streams):
        if stream.block_bytes <= READ_BYTES:
            short.append(_block_ranges(number, stream, copies[number]))
    try:
        yield from _read_blocks(store, streams, itertools.chain(*short))
        for number, stream in enumerate(streams):
            if stream.block_bytes > READ_BYTES and copies[number]:
                yield from _read_file(store, number, stream)
    except (MissingError, ShortReadError) as cause:
        raise CorruptError(f"{cause}: missing, or shorter than its index says") from cause


def _read_blocks(
    store: Store, streams: Sequence[ShardStream], pieces: Iterable[_BlockRange]
) -> Iterator[tuple[_BlockRange, memoryview]]:
    """Read blocks in the order of arrival, and verify each."""
    asked: dict[Range, _BlockRange] = {}

    def ranges() -> Iterator[Range]:
        for piece in pieces:
            stream = streams[piece.stream]
            part, start = divmod(piece.start, stream.part_bytes)
            request = Range(stream.keys[part], start, piece.length)
            asked[request] = piece
            yield request

    for answer in RangeReader(store).read(ranges()):
        piece = asked.pop(answer.range)
        where = f"{store.url}/{answer.range.key}"
        _verify(streams[piece.stream], piece, answer.data, where=where)
        yield piece, answer.data


def _read_file(
    store: Store, number: int, stream: ShardStream
) -> Iterator[tuple[_BlockRange, memoryview]]:
    """Read the one object of a stream in order; its digest shows only after the last byte.

    Raises:
        CorruptError: it is damaged; all of it was yielded.
    """
    [key], [digest] = stream.keys, stream.digests
    hasher = blake3()
    for first in range(0, stream.size, _READS_AT_ONCE * READ_BYTES):
        after = min(first + _READS_AT_ONCE * READ_BYTES, stream.size)
        ranges = [
            Range(key, start, min(READ_BYTES, after - start))
            for start in range(first, after, READ_BYTES)
        ]
        for (_, start, length), data in sorted(RangeReader(store).read(ranges)):
            hasher.update(data)
            yield _BlockRange(number, start, length), data
    if hasher.hexdigest() != digest:
        raise CorruptError(
            f"{store.url}/{key}: its {stream.size} bytes do not match their BLAKE3 digest"
        )


def _verify(stream: ShardStream, piece: _BlockRange, data: memoryview, *, where: str) -> None:
    size = stream.block_bytes
    for offset in range(0, len(data), size):
        start = piece.start + offset
        block = data[offset : offset + size]
        if blake3(block).hexdigest() != stream.digests[start // size]:
            begin = start % stream.part_bytes
            raise CorruptError(
                f"{where}: bytes {begin} to {begin + len(block)} do not match their BLAKE3 digest"
            )


def _cut(copies: Sequence[_ByteCopy], piece: _BlockRange) -> Iterator[_ByteCopy]:
    """The parts of copies that lie in a range of blocks."""
    end = piece.start + piece.length
    # The copies do not overlap, so that their ends are sorted as their starts are.
    first = bisect.bisect_right(copies, piece.start, key=lambda copy: copy.start + copy.length)
    for number in range(first, len(copies)):
        copy = copies[number]
        if copy.start >= end:
            return
        low, high = max(copy.start, piece.start), min(copy.start + copy.length, end)
        yield _ByteCopy(low, copy.place + low - copy.start, high - low)
