"""Triton bodies of deltas.

A scan has three launches: one bit per element and a count per chunk; a running sum of the counts;
then every chunk writes its entries from its own start. No atomics, so that the order is fixed.
The digest is summed over the entries alone: 16 multiplications per element would be slower than
the memory, per change they are nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.kernels.delta_changes import Changes
from etude.kernels.digest_triton import SEED_A, SEED_B, element_mix
from etude.kernels.dispatch import on_device
from etude.kernels.tiles import CHUNK, Tiles
from etude.kernels.words import lanes_per_element

WORD = 32
"""Bits of one word of the mask."""

ENTRIES = 1024
"""Changes that a program visits at once."""


@triton.jit
def bf16_bits(bits: tl.tensor) -> tl.tensor:
    """fp32 bits to the nearest bf16 bits, in integers: the interpreter's cast truncates."""
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, (bits >> 16) | 0x40, nearest).to(tl.uint16)


@triton.jit
def _chunk(
    chunk_tile: tl.tensor,
    first_chunk: tl.tensor,
    base: tl.tensor,
    elements: tl.tensor,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """This program's chunk: places in its tile, the tile's first element and its size."""
    chunk = tl.program_id(0)
    tile = tl.load(chunk_tile + chunk)
    # Without these hints an alignment read from memory is unknown, and loads are two bytes wide.
    size = tl.multiple_of(tl.load(elements + tile), ALIGN)
    start = tl.multiple_of(tl.load(base + tile), ALIGN)
    first = (chunk - tl.load(first_chunk + tile)).to(tl.int32) * CHUNK
    return first + tl.arange(0, CHUNK), start, size


@triton.jit
def _mark(
    old: tl.tensor,
    new: tl.tensor,
    fresh: tl.tensor,
    mask: tl.tensor,
    chunk_counts: tl.tensor,
    chunk_tile: tl.tensor,
    first_chunk: tl.tensor,
    base: tl.tensor,
    elements: tl.tensor,
    CAST: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    local, start, size = _chunk(chunk_tile, first_chunk, base, elements, CHUNK, ALIGN)
    inside = local < size
    place = start + local
    before = tl.load(old + place, mask=inside, other=0)
    after = tl.load(new + place, mask=inside, other=0)
    if CAST:
        after = bf16_bits(after)
        tl.store(fresh + place, after, mask=inside)
    differs = ((before != after) & inside).to(tl.int32)
    bits = tl.reshape(differs, (CHUNK // 32, 32)) << tl.arange(0, 32)[None, :]
    spots = chunk.to(tl.int64) * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
    tl.store(mask + spots, tl.sum(bits, 1))
    tl.store(chunk_counts + chunk, tl.sum(differs, 0))


@triton.jit
def _compact(
    new: tl.tensor,
    mask: tl.tensor,
    chunk_ends: tl.tensor,
    overflow: tl.tensor,
    index: tl.tensor,
    value: tl.tensor,
    chunk_tile: tl.tensor,
    first_chunk: tl.tensor,
    base: tl.tensor,
    elements: tl.tensor,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    begin = tl.load(chunk_ends + chunk)
    if (tl.load(chunk_ends + chunk + 1) > begin) & (tl.load(overflow) == 0):
        local, start, _ = _chunk(chunk_tile, first_chunk, base, elements, CHUNK, ALIGN)
        spots = chunk.to(tl.int64) * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
        bits = tl.load(mask + spots)
        flags = tl.reshape((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1, (CHUNK,))
        entry = begin + tl.cumsum(flags, 0) - 1
        changed = flags != 0
        tl.store(index + entry, local, mask=changed)
        numbers = tl.load(new + start + local, mask=changed, other=0)
        tl.store(value + entry, numbers, mask=changed)


@triton.jit
def _visit(
    raw: tl.tensor,
    old: tl.tensor,
    partial: tl.tensor,
    counts: tl.tensor,
    starts: tl.tensor,
    index: tl.tensor,
    value: tl.tensor,
    overflow: tl.tensor,
    elements: tl.tensor,
    base: tl.tensor,
    width: tl.tensor,
    pitch: tl.tensor,
    lane: tl.tensor,
    lane_pitch: tl.tensor,
    limit: tl.int64,
    LANES: tl.constexpr,
    KEEP: tl.constexpr,
    WRITE: tl.constexpr,
    DIGEST: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    count = tl.where(tl.load(overflow) == 0, tl.load(counts + tile), 0)
    begin = tl.load(starts + tile)
    size = tl.load(elements + tile)
    columns = tl.load(width + tile)
    sum_a = tl.zeros([ENTRIES], tl.uint64)
    sum_b = tl.zeros([ENTRIES], tl.uint64)
    for first in range(0, count, ENTRIES):
        number = first + tl.arange(0, ENTRIES)
        entry = begin + number
        listed = (number < count) & (entry >= 0) & (entry < limit)
        local = tl.load(index + entry, mask=listed, other=0)
        # A delta may come from elsewhere: whatever it says, nothing outside the tile is touched.
        inside = listed & (local >= 0) & (local < size)
        row = local // columns
        column = local - row * columns
        place = tl.load(base + tile) + row * tl.load(pitch + tile) + column
        before = tl.load(raw + place, mask=inside, other=0)
        after = tl.load(value + entry, mask=inside, other=0)
        if KEEP:
            tl.store(old + entry, before, mask=listed)
        if WRITE:
            tl.store(raw + place, after, mask=inside)
        if DIGEST:
            at = tl.load(lane + tile) + row * tl.load(lane_pitch + tile) + column * LANES
            up = element_mix(after, at, SEED_A, LANES) - element_mix(before, at, SEED_A, LANES)
            sum_a += tl.where(inside, up, 0)
            up = element_mix(after, at, SEED_B, LANES) - element_mix(before, at, SEED_B, LANES)
            sum_b += tl.where(inside, up, 0)
    if DIGEST:
        tl.store(partial + 2 * tile, tl.sum(sum_a, 0).to(tl.int64))
        tl.store(partial + 2 * tile + 1, tl.sum(sum_b, 0).to(tl.int64))


def scan(old: Tensor, new: Tensor, *, tiles: Tiles, capacity: int) -> Changes:
    """What differs, tile after tile."""
    return _scanned(old, new, new, tiles=tiles, capacity=capacity)


def cast_scan(
    master: Tensor, old: Tensor, *, tiles: Tiles, capacity: int
) -> tuple[Tensor, Changes]:
    """Round and compare; the master is given as words."""
    new = torch.empty_like(old)
    return new, _scanned(old, master, new, tiles=tiles, capacity=capacity)


def digest(old: Tensor, changes: Changes) -> Tensor:
    """What the changes add to the state digest; zero after an overflow."""
    return _launch(old, old, changes, keep=False, writes=False)


def visit(raw: Tensor, changes: Changes, *, total: int, writes: bool) -> tuple[Tensor, Tensor]:
    """Gather what the first `total` entries name, and overwrite it if asked to.

    Returns:
        The old values [k], and, if nothing is written, what the changes add to the digest [2].
    """
    old = torch.empty(total, dtype=raw.dtype, device=raw.device)
    return old, _launch(raw, old, changes, keep=True, writes=writes)


def _scanned(old: Tensor, source: Tensor, new: Tensor, *, tiles: Tiles, capacity: int) -> Changes:
    """Scan `source` (fp32 if it is wider than `old`, and rounded into `new` then) against `old`."""
    device, chunks = old.device, tiles.chunk_tile.numel()
    mask = torch.empty(chunks, CHUNK // WORD, dtype=torch.int32, device=device)
    chunk_counts = torch.empty(chunks, dtype=torch.int32, device=device)
    table = (tiles.chunk_tile, tiles.first_chunk, tiles.base, tiles.elements)
    index = torch.empty(capacity, dtype=torch.int32, device=device)
    value = torch.empty(capacity, dtype=new.dtype, device=device)
    cut = {"CHUNK": CHUNK, "ALIGN": tiles.align, "num_warps": 8}
    with on_device(old):
        if chunks:
            casts = source.dtype != old.dtype
            _mark[(chunks,)](old, source, new, mask, chunk_counts, *table, CAST=casts, **cut)
        ends = torch.zeros(chunks + 1, dtype=torch.int64, device=device)
        torch.cumsum(chunk_counts, 0, out=ends[1:])
        overflow = ends[-1] > capacity
        if chunks:
            flag = overflow.view(torch.uint8)
            _compact[(chunks,)](new, mask, ends, flag, index, value, *table, **cut)
    bounds = ends[tiles.first_chunk]
    return Changes(
        tiles=tiles,
        counts=bounds.diff().to(torch.int32),
        starts=bounds[:-1],
        index=index,
        value=value,
        overflow=overflow,
    )


def _launch(raw: Tensor, old: Tensor, changes: Changes, *, keep: bool, writes: bool) -> Tensor:
    """One program per tile; returns the digest's change, zero if live words are overwritten."""
    tiles = changes.tiles
    programs = tiles.base.numel()
    partial = torch.empty(0 if writes else programs, 2, dtype=torch.int64, device=raw.device)
    if programs:
        with on_device(raw):
            _visit[(programs,)](
                raw,
                old,
                partial,
                *(changes.counts, changes.starts, changes.index, changes.value),
                changes.overflow.view(torch.uint8),
                *(tiles.elements, tiles.base, tiles.width),
                *(tiles.pitch, tiles.lane, tiles.lane_pitch),
                # Starts may come from elsewhere too: `old` is as long as the counts add up to.
                old.numel() if keep else changes.index.numel(),
                LANES=lanes_per_element(8 * raw.itemsize),
                KEEP=keep,
                WRITE=writes,
                DIGEST=not writes,
                ENTRIES=ENTRIES,
            )
    return partial.sum(0)
