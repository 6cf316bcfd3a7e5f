"""Reference of the delta kernels in plain torch, tile by tile; also used for CPU tensors."""

from dataclasses import replace

import torch
from torch import Tensor

from etude.kernels.delta_changes import ResolvedWords, WordChanges, change_positions
from etude.kernels.digest_reference import element_sums
from etude.kernels.raw_words import SIGNED, Axis, lanes_per_element, signed, unsigned, widen
from etude.kernels.tiles import Tiles


def scan(old: Tensor, new: Tensor, *, tiles: Tiles, capacity: int) -> WordChanges:
    """Find the differences, tile after tile."""
    places = [
        (signed(old[start:stop]) != signed(new[start:stop])).nonzero().view(-1)
        for start, stop in _ranges(tiles)
    ]
    counts = torch.tensor([p.numel() for p in places], dtype=torch.int32, device=old.device)
    ends = counts.cumsum(0, dtype=torch.int64)
    total = sum(p.numel() for p in places)
    index = torch.zeros(capacity, dtype=torch.int32, device=old.device)
    value = torch.zeros(capacity, dtype=new.dtype, device=old.device)
    if 0 < total <= capacity:
        index[:total] = torch.cat(places).to(torch.int32)
        taken = [
            signed(new[start:stop])[p]
            for (start, stop), p in zip(_ranges(tiles), places, strict=True)
        ]
        signed(value)[:total] = torch.cat(taken)
    overflow = torch.tensor(total > capacity, device=old.device)
    return WordChanges(
        tiles=tiles,
        counts=counts,
        starts=ends - counts,
        index=index,
        value=value,
        overflow=overflow,
    )


def cast_scan(
    master: Tensor, old: Tensor, *, tiles: Tiles, capacity: int
) -> tuple[Tensor, WordChanges]:
    """Round, then compare; the master is given as words."""
    new = torch.empty_like(old)
    piece = 1 << 18
    for start in range(0, master.numel(), piece):
        signed(new)[start : start + piece] = round_to_bf16(master[start : start + piece])
    return new, scan(old, new, tiles=tiles, capacity=capacity)


def round_to_bf16(master: Tensor) -> Tensor:
    """The bf16 bits nearest to fp32 bits, ties to even; NaN stays NaN.  uint32 -> int16."""
    bits = widen(master)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return torch.where(is_nan, (bits >> 16) | 0x40, nearest).to(torch.int16)


def digest(old: Tensor, changes: WordChanges) -> Tensor:
    """Difference of the changes to the state digest; zero after an overflow."""
    total = 0 if changes.overflow else int(changes.counts.sum())
    return visit(old, changes, total=total, writes=False)[1]


def resolve(raw: Tensor, changes: WordChanges, *, total: int, axis: Axis) -> ResolvedWords:
    """Resolve the first `total` entries, whose values are differences."""
    old, _ = visit(raw, changes, total=total, writes=False)
    bits = 8 * raw.itemsize
    numbers = move_words(widen(old), widen(changes.value[:total]), axis=axis, bits=bits)
    new = unsigned(numbers.to(SIGNED[raw.itemsize]))
    absolute = replace(changes, index=changes.index[:total], value=new)
    return ResolvedWords(old, new, visit(raw, absolute, total=total, writes=False)[1])


def move_words(old: Tensor, steps: Tensor, *, axis: Axis, bits: int) -> Tensor:
    """Words moved by `steps` along an axis, as numbers.  [k], [k] -> [k].

    The ulp axis: `key(u) = u ^ top if u < top else ~u` with `top = 2^(bits-1)`, a bijection.
    """
    top, mask = 1 << (bits - 1), (1 << bits) - 1
    if axis is Axis.PLAIN:
        return (old + steps) & mask
    place = (torch.where(old < top, old ^ top, mask - old) + steps) & mask
    return torch.where(place >= top, place ^ top, mask - place)


def visit(raw: Tensor, changes: WordChanges, *, total: int, writes: bool) -> tuple[Tensor, Tensor]:
    """Gather what the first `total` entries name, and overwrite it if asked to.

    Returns:
        The old values [k], and the difference to the state digest [2].
    """
    if total == 0:
        return raw[:0].clone(), torch.zeros(2, dtype=torch.int64, device=raw.device)
    place, lane, inside = change_positions(changes, total=total)
    new = changes.value[:total]
    old = unsigned(torch.where(inside, signed(raw)[place], 0))
    lanes = lanes_per_element(8 * raw.itemsize)
    kept = lane[inside]
    change = element_sums(widen(new)[inside], kept, lanes=lanes)
    change -= element_sums(widen(old)[inside], kept, lanes=lanes)
    if writes:
        signed(raw)[place[inside]] = signed(new)[inside]
    return old, change


def _ranges(tiles: Tiles) -> list[tuple[int, int]]:
    base = tiles.base.tolist()
    sizes = tiles.elements.tolist()
    return [(start, start + size) for start, size in zip(base, sizes, strict=True)]
