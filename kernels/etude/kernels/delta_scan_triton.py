"""Triton bodies that find changes.

A scan has three launches: one bit per element and a count per chunk; a running sum of the counts;
then every chunk writes its entries from its own start. No atomics, so that the order is fixed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.kernels.delta_changes import WordChanges
from etude.kernels.dispatch import on_device
from etude.kernels.tiles import CHUNK, Tiles

WORD = 32
"""Bits of one word of the mask."""


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
    """This program's chunk: indices in its tile, the tile's first element and its size."""
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


def scan(old: Tensor, new: Tensor, *, tiles: Tiles, capacity: int) -> WordChanges:
    """Find the differences, tile after tile."""
    return _scanned(old, new, new, tiles=tiles, capacity=capacity)


def cast_scan(
    master: Tensor, old: Tensor, *, tiles: Tiles, capacity: int
) -> tuple[Tensor, WordChanges]:
    """Round and compare; the master is given as words."""
    new = torch.empty_like(old)
    return new, _scanned(old, master, new, tiles=tiles, capacity=capacity)


def _scanned(
    old: Tensor, source: Tensor, new: Tensor, *, tiles: Tiles, capacity: int
) -> WordChanges:
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
    return WordChanges(
        tiles=tiles,
        counts=bounds.diff().to(torch.int32),
        starts=bounds[:-1],
        index=index,
        value=value,
        overflow=overflow,
    )
