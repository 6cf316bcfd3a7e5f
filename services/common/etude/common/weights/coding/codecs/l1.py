"""L1, the default codec: gaps between changed elements and differences, as Rice codes.

Payload: `gap_width u8 | step_width u8 | gap_escapes varint | step_escapes varint | gap escapes
(u32 each) | step escapes (a word each) | low bits of the gaps | of the steps | quotients of the
gaps | of the steps`; the Rice codes are those of split_rice, the varints have 3 bytes at most.

Gaps are `place - previous - 1` (previous of the first is -1). Steps are z - 1, where z is the
zigzag of the difference as a signed word: the lowest bit is the sign, the others are how far the
word moved beyond a neighbour. Widths are those that make the payload shortest, the narrower of
equals. Equal changes have one encoding.

Storing the difference, not the new value, lets a block be folded, or applied backwards, without
any weights.
"""

from typing import NamedTuple

import numpy as np
from typing_extensions import Buffer

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import split_rice
from etude.common.weights.coding.codecs.ids import Encoded
from etude.common.weights.coding.codecs.split_rice import Octets, Wide
from etude.common.weights.coding.codecs.varint import put_varint, take_varint
from etude.common.weights.tensors.changes import BlockChanges
from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.words import Indices, Words

MAX_ELEMENTS = 1 << 21
"""Of a block: its escapes are counted in 3 bytes."""
_MOST_GAP_WIDTH = 20
_MOST_STEP_WIDTH = 32
_GAP = np.dtype("<u4")
_SPARE_BYTES = 16
"""Zeros behind a payload, so that loops read eight bytes anywhere in it."""
_GAPS, _STEPS = 10, 20
_BEYOND, _LEFT_OVER = 30, 31


class _Head(NamedTuple):
    """Header before the streams."""

    gap_width: int
    step_width: int
    gap_escapes: int
    step_escapes: int
    num_bytes: int


def encode(changes: BlockChanges) -> Encoded:
    """The payload of a block's changes.  k changes.

    Raises:
        ValueError: places do not increase or lie too far apart, or a difference is 0.
    """
    gaps = np.empty(changes.index.size, _GAP)
    steps = np.empty_like(changes.delta)
    if not _numbers(readonly(changes.index), readonly(changes.delta), gaps, steps):
        raise ValueError("changes are not strictly increasing, too far apart, or 0")
    word = changes.delta.dtype
    gap_width, gap_bits, gap_escapes = split_rice.best(readonly(gaps), _MOST_GAP_WIDTH, 32)
    step_width, step_bits, step_escapes = split_rice.best(
        readonly(steps), _widest(word), 8 * word.itemsize
    )
    head = bytearray((gap_width, step_width))
    put_varint(head, gap_escapes)
    put_varint(head, step_escapes)
    far, long = np.empty(gap_escapes, _GAP), np.empty(step_escapes, word)
    low = len(head) + far.nbytes + long.nbytes
    middle = low + _octets(gaps.size * gap_width)
    high = middle + _octets(gaps.size * step_width)
    last = high + _octets(gap_bits)
    size = last + _octets(step_bits)
    wide = np.zeros((size + _SPARE_BYTES) // 8, np.uint64)
    split_rice.write_low(readonly(gaps), gap_width, wide, 8 * low)
    split_rice.write_low(readonly(steps), step_width, wide, 8 * middle)
    split_rice.write_high(readonly(gaps), gap_width, wide, 8 * high, far)
    split_rice.write_high(readonly(steps), step_width, wide, 8 * last, long)
    octets = wide.view(np.uint8)
    octets[:low] = np.frombuffer(bytes(head) + far.tobytes() + long.tobytes(), np.uint8)
    return Encoded(octets[:size].tobytes(), 0)


def decode(
    payload: Buffer,
    *,
    elements: int,
    changed: int,
    flags: int,
    word: np.dtype[np.unsignedinteger],
    where: str,
) -> BlockChanges:
    """The changes of a block.

    Raises:
        CorruptError: not what encode() writes for this number of elements and changes.
    """
    if flags or not 0 <= changed <= elements <= MAX_ELEMENTS:
        raise CorruptError(f"{where}: changed: {changed} of {elements} elements, flags {flags}")
    data = memoryview(payload).cast("B")
    head = _head(data, changed=changed, word=word, where=where)
    gaps_end = head.num_bytes + _GAP.itemsize * head.gap_escapes
    low = gaps_end + word.itemsize * head.step_escapes
    middle = low + _octets(changed * head.gap_width)
    high = middle + _octets(changed * head.step_width)
    if 4 * (len(data) - high) < changed:  # each change has a bit or more in two streams
        raise CorruptError(f"{where}: {len(data)} bytes are too few for {changed} changes")
    far = np.frombuffer(bytes(data[head.num_bytes : gaps_end]), _GAP)
    long = np.frombuffer(bytes(data[gaps_end:low]), word)
    padded = bytes(data).ljust((len(data) + _SPARE_BYTES) // 8 * 8, b"\0")
    wide = readonly(np.frombuffer(padded, np.uint64))
    index, delta = np.empty(changed, np.uint32), np.empty(changed, word)
    starts = (low, middle, high, len(data))
    widths = (head.gap_width, head.step_width)
    fault = _decode(wide, starts, widths, readonly(far), readonly(long), elements, index, delta)
    if fault:
        raise CorruptError(f"{where}: {_fault_text(fault)}")
    return BlockChanges(index, delta)


def _widest(word: np.dtype[np.unsignedinteger]) -> int:
    """The most low bits of a step: a shift by all bits of a word is none."""
    return min(_MOST_STEP_WIDTH, 8 * word.itemsize - 1)


def _octets(bits: int) -> int:
    return (bits + 7) // 8


def _head(
    data: memoryview, *, changed: int, word: np.dtype[np.unsignedinteger], where: str
) -> _Head:
    if len(data) < 2:
        raise CorruptError(f"{where}: {len(data)} bytes are no L1 block")
    gap_width, step_width = data[0], data[1]
    gap_escapes, at = take_varint(data, 2, where=f"{where}: gap escapes")
    step_escapes, at = take_varint(data, at, where=f"{where}: step escapes")
    if gap_width > _MOST_GAP_WIDTH or step_width > _widest(word):
        raise CorruptError(f"{where}: widths: {gap_width} and {step_width} bits")
    if gap_escapes > changed or step_escapes > changed:
        raise CorruptError(f"{where}: {gap_escapes}, {step_escapes} escapes; {changed} changes")
    return _Head(gap_width, step_width, gap_escapes, step_escapes, at)


def _fault_text(fault: int) -> str:
    if fault == _BEYOND:
        return "gaps: a place beyond the block"
    if fault == _LEFT_OVER:
        return "steps: left-over bytes"
    stream = "gaps" if fault < _STEPS else "steps"
    return f"{stream}: {split_rice.FAULTS[fault % 10]}"


@compiled
def _numbers(index: Indices, delta: Words, gaps: Indices, steps: Words) -> bool:
    """Fill gaps and steps; False if the changes are none."""
    previous = np.int64(-1)
    shift = np.uint64(64 - 8 * delta.itemsize)
    good = True
    for i in range(index.size):
        gap = np.int64(index[i]) - previous - 1
        previous = np.int64(index[i])
        good &= (gap >= 0) & (gap < MAX_ELEMENTS) & (delta[i] != 0)
        gaps[i] = gap
        # Sign-extended from w bits: shifted up as unsigned, down as signed.
        signed = np.int64(np.uint64(delta[i]) << shift) >> np.int64(shift)
        steps[i] = (np.uint64(signed << 1) ^ np.uint64(signed >> 63)) - np.uint64(1)
    return good


@compiled
def _decode(  # noqa: PLR0913, PLR0917 - what there is of one block
    wide: Wide,
    starts: tuple[int, int, int, int],
    widths: tuple[int, int],
    far: Indices,
    long: Words,
    elements: int,
    index: Indices,
    delta: Words,
) -> int:
    """Fill index and delta; a fault, or 0."""
    low, middle, high, size = starts
    most = np.uint64((MAX_ELEMENTS - 1) >> widths[0])
    fault, end = split_rice.read_high(wide, 8 * high, far, most, index)
    if fault:
        return _GAPS + fault
    most = ~np.uint64(0) >> np.uint64(64 - 8 * delta.itemsize + widths[1])
    last = (end + 7) & ~7
    fault, stop = split_rice.read_high(wide, last, long, most, delta)
    if fault:
        return _STEPS + fault
    octets = wide.view(np.uint8)
    if not _are_padded(octets, (8 * low + index.size * widths[0], end)):
        return _GAPS + split_rice.PADDING
    if not _are_padded(octets, (8 * middle + index.size * widths[1], stop)):
        return _STEPS + split_rice.PADDING
    if (stop + 7) >> 3 != size:
        return _LEFT_OVER
    split_rice.read_low(wide, 8 * low, widths[0], index)
    split_rice.read_low(wide, 8 * middle, widths[1], delta)
    return _sum(elements, index, delta)


@compiled
def _sum(elements: int, index: Indices, delta: Words) -> int:
    """From gaps and steps to places and differences; a fault, or 0."""
    place = np.int64(-1)
    for i in range(index.size):
        place += np.int64(index[i]) + 1
        index[i] = place
    # A step of all bits would be a difference of 0.
    is_good = True
    all_bits = ~np.uint64(0) >> np.uint64(64 - 8 * delta.itemsize)
    for i in range(delta.size):
        step = np.uint64(delta[i])
        is_good &= step != all_bits
        zigzag = step + np.uint64(1)
        delta[i] = (zigzag >> np.uint64(1)) ^ (np.uint64(0) - (zigzag & np.uint64(1)))
    if place >= elements:
        return _BEYOND
    return 0 if is_good else _STEPS + split_rice.LARGE


@compiled
def _are_padded(octets: Octets, ends: tuple[int, int]) -> bool:
    return split_rice.is_padded(octets, ends[0]) and split_rice.is_padded(octets, ends[1])
