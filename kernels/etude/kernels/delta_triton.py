"""Triton bodies that visit the entries of a delta: gather, resolve, overwrite, digest.

The digest is summed over the entries alone: a dozen 64-bit multiplications per element would take
longer than reading it, per change they are nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.kernels.delta_changes import ResolvedWords, WordChanges
from etude.kernels.digest_triton import SEED_A, SEED_B, element_mix
from etude.kernels.dispatch import on_device
from etude.kernels.raw_words import Axis, lanes_per_element

ENTRIES = 1024
"""Changes that a program visits at once."""


@triton.jit
def _move_words(
    old: tl.tensor, steps: tl.tensor, AXIS: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """Words moved by `steps` along an axis; see delta_reference.move_words."""
    top = 1 << (BITS - 1)
    mask = (1 << BITS) - 1
    word = old.to(tl.int64)
    if AXIS == 2:
        word = tl.where(word < top, word ^ top, mask - word)
    place = (word + steps.to(tl.int64)) & mask
    if AXIS == 2:
        place = tl.where(place >= top, place ^ top, mask - place)
    return place.to(old.dtype)


@triton.jit
def _mixed(
    before: tl.tensor,
    after: tl.tensor,
    lane: tl.tensor,
    inside: tl.tensor,
    SEED: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """Difference of changes to one sum of the digest; 0 outside the tile."""
    up = element_mix(after, lane, SEED, LANES) - element_mix(before, lane, SEED, LANES)
    return tl.where(inside, up, 0)


@triton.jit
def _visit(
    raw: tl.tensor,
    old: tl.tensor,
    fresh: tl.tensor,
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
    AXIS: tl.constexpr,
    BITS: tl.constexpr,
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
        after = tl.load(value + entry, mask=listed, other=0)
        if AXIS != 0:
            after = _move_words(before, after, AXIS, BITS)
            tl.store(fresh + entry, after, mask=listed)
        if KEEP:
            tl.store(old + entry, before, mask=listed)
        if WRITE:
            tl.store(raw + place, after, mask=inside)
        if DIGEST:
            at = tl.load(lane + tile) + row * tl.load(lane_pitch + tile) + column * LANES
            sum_a += _mixed(before, after, at, inside, SEED_A, LANES)
            sum_b += _mixed(before, after, at, inside, SEED_B, LANES)
    if DIGEST:
        tl.store(partial + 2 * tile, tl.sum(sum_a, 0).to(tl.int64))
        tl.store(partial + 2 * tile + 1, tl.sum(sum_b, 0).to(tl.int64))


def digest(old: Tensor, changes: WordChanges) -> Tensor:
    """Difference of the changes to the state digest; zero after an overflow."""
    return _launch(old, changes, _Visit(limit=changes.index.numel()))


def visit(raw: Tensor, changes: WordChanges, *, total: int, writes: bool) -> tuple[Tensor, Tensor]:
    """Gather what the first `total` entries name, and overwrite it if asked to.

    Returns:
        The old values [k], and, if nothing is written, the difference to the digest [2].
    """
    old = torch.empty(total, dtype=raw.dtype, device=raw.device)
    return old, _launch(raw, changes, _Visit(limit=total, old=old, writes=writes))


def resolve(raw: Tensor, changes: WordChanges, *, total: int, axis: Axis) -> ResolvedWords:
    """Resolve the first `total` entries, whose values are differences."""
    old = torch.empty(total, dtype=raw.dtype, device=raw.device)
    fresh = torch.empty_like(old)
    what = _Visit(limit=total, old=old, fresh=fresh, axis=axis)
    return ResolvedWords(old, fresh, _launch(raw, changes, what))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """Work at every entry below `limit`, in addition to the digest."""

    limit: int
    old: Tensor | None = None
    """Output for the old values."""
    fresh: Tensor | None = None
    """Output for the new values, if those given are differences on an axis."""
    axis: Axis = Axis.ABSOLUTE
    writes: bool = False
    """True to overwrite; no digest is computed then."""


def _launch(raw: Tensor, changes: WordChanges, what: _Visit) -> Tensor:
    """Launch one program per tile; returns the digest's change, zero if words are overwritten."""
    tiles = changes.tiles
    programs = tiles.base.numel()
    partial = torch.empty(0 if what.writes else programs, 2, dtype=torch.int64, device=raw.device)
    if programs:
        with on_device(raw):
            _visit[(programs,)](
                raw,
                raw if what.old is None else what.old,
                raw if what.fresh is None else what.fresh,
                partial,
                *(changes.counts, changes.starts, changes.index, changes.value),
                changes.overflow.view(torch.uint8),
                *(tiles.elements, tiles.base, tiles.width),
                *(tiles.pitch, tiles.lane, tiles.lane_pitch),
                what.limit,
                LANES=lanes_per_element(tiles.bits),
                AXIS=what.axis.value,
                BITS=tiles.bits,
                KEEP=what.old is not None,
                WRITE=what.writes,
                DIGEST=not what.writes,
                ENTRIES=ENTRIES,
            )
    return partial.sum(0)
