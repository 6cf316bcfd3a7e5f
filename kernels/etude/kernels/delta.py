"""Deltas of weights on the device: find what changed, predict its digest, apply it, undo it.

Words are raw bits: nothing here rounds, except `cast_scan`, which rounds the fp32 master once. All
results are exact and in one order (tile, then place in it), whatever the launch. A delta holds
absolute new values, so that applying it twice is the same as once.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from etude.kernels import delta_reference
from etude.kernels.delta_changes import Changes, checked
from etude.kernels.dispatch import uses_triton
from etude.kernels.tiles import Tiles
from etude.kernels.words import UNSIGNED, words


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Changes):
    """Changes, and what they do to the state digest."""

    digest: Tensor
    """What they add to it, zero after an overflow (lanes as in `digest_scan`). int64 [2]"""


class CastScan(NamedTuple):
    """What an optimiser step publishes."""

    new: Tensor
    """The master rounded to bf16, shaped as it."""
    delta: Delta


class Prepared(NamedTuple):
    """What a delta would do to live words. k changes."""

    old: Tensor
    """The live values that it replaces, in the order of its entries; also the undo record. [k]"""
    digest: Tensor
    """What it adds to the state digest. int64 [2]"""


def delta_scan(old: Tensor, new: Tensor, *, tiles: Tiles, capacity: int) -> Delta:
    """What changed from one tensor to another. Does not wait for the device.

    Args:
        old: contiguous, elements of 8, 16 or 32 bits, compared as raw bits. [n]
        new: shaped and typed as old.
        tiles: contiguous tiles of the flat tensors.
        capacity: entries to make room for; more changes set `overflow`, they are never cut off.

    Raises:
        ValueError: old, new and tiles do not fit each other, or capacity is negative.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"old is {old.dtype} {old.shape}, new is {new.dtype} {new.shape}")
    before, after = words(old, name="old"), words(new, name="new")
    _fit(before, after, tiles=tiles, capacity=capacity)
    if uses_triton(before):
        from etude.kernels import delta_triton

        changes = delta_triton.scan(before, after, tiles=tiles, capacity=capacity)
    else:
        changes = delta_reference.scan(before, after, tiles=tiles, capacity=capacity)
    return _with_digest(before, changes)


def cast_scan(master: Tensor, old: Tensor, *, tiles: Tiles, capacity: int) -> CastScan:
    """Round an fp32 master to bf16 and find what changed, in one read of both.

    Rounds to the nearest, ties to even; a NaN keeps its sign and upper payload and becomes quiet.
    (PyTorch's cast gives each NaN one pattern, and not the same one on every device.)

    Args:
        master: fp32, after the optimiser step; contiguous. [n]
        old: bf16, the published values; shaped as the master, and left alone.
        tiles: contiguous tiles of the flat tensors.
        capacity: as for `delta_scan`.

    Raises:
        ValueError: master, old and tiles do not fit each other, or capacity is negative.
    """
    if master.dtype != torch.float32 or old.dtype != torch.bfloat16 or old.shape != master.shape:
        raise ValueError(
            f"master is {master.dtype} {master.shape}, old is {old.dtype} {old.shape}: "
            "float32 and bfloat16 of one shape"
        )
    source, before = words(master, name="master"), words(old, name="old")
    _fit(before, source, tiles=tiles, capacity=capacity)
    if uses_triton(before):
        from etude.kernels import delta_triton

        new, changes = delta_triton.cast_scan(source, before, tiles=tiles, capacity=capacity)
    else:
        new, changes = delta_reference.cast_scan(source, before, tiles=tiles, capacity=capacity)
    rounded = new.view(torch.bfloat16).view(master.shape)
    return CastScan(rounded, _with_digest(before, changes))


def staged_delta(tiles: Tiles, *, counts: Tensor, index: Tensor, value: Tensor) -> Delta:
    """A delta that came over the wire; its digest is zero until `delta_prepare` has seen the old.

    Args:
        tiles: of the live words, contiguous or not.
        counts: changes of each tile. int32 [N]
        index: places inside the tiles, in the order of the tiles, rising in each. int32 [k]
        value: new raw bits, k of them.

    Raises:
        ValueError: lengths, types or devices do not fit each other.
    """
    device = tiles.base.device
    ends = counts.cumsum(0, dtype=torch.int64)
    delta = Delta(
        tiles=tiles,
        counts=counts,
        starts=ends - counts,
        index=index,
        value=words(value, name="value"),
        overflow=torch.zeros((), dtype=torch.bool, device=device),
        digest=torch.zeros(2, dtype=torch.int64, device=device),
    )
    _checked_columns(delta)
    return delta


def delta_prepare(live: Tensor, *, delta: Delta) -> Prepared:
    """Gather what a delta would overwrite and predict the digest; writes nothing.

    Waits for the device once, to learn how many changes there are. Entries outside their tile are
    passed over (old 0, digest 0): with ETUDE_KERNELS_CHECK=1 they are refused.

    Raises:
        ValueError: live does not fit the delta, or the delta overflowed.
    """
    raw, total = _target(live, delta)
    return Prepared(*_visit(raw, delta, total=total, writes=False))


def delta_apply(live: Tensor, *, delta: Delta) -> Tensor:
    """Overwrite live words, in place; safe to repeat.

    The caller keeps others from reading and writing `live` meanwhile. Bytes of `live` that the
    delta does not name are left alone, and the autograd version counter does not move.

    Returns:
        The values overwritten, in the order of the entries. [k]

    Raises:
        ValueError: live does not fit the delta, or the delta overflowed.
    """
    raw, total = _target(live, delta)
    return _visit(raw, delta, total=total, writes=True)[0]


def delta_undo(live: Tensor, *, delta: Delta, old: Tensor) -> Tensor:
    """Write the old values of `delta_prepare` back, in place; safe to repeat.

    Returns:
        The values overwritten: the delta's, wherever it had been applied. [k]

    Raises:
        ValueError: live or old does not fit the delta, or the delta overflowed.
    """
    raw, total = _target(live, delta)
    if old.dtype != raw.dtype or old.shape != (total,) or old.device != raw.device:
        raise ValueError(
            f"old is {old.dtype} {old.shape} on {old.device}, not {raw.dtype} [{total}]"
        )
    return _visit(raw, replace(delta, value=old), total=total, writes=True)[0]


def _with_digest(before: Tensor, changes: Changes) -> Delta:
    """A scan's delta: the old words are gathered once more, at the changes only."""
    if uses_triton(before):
        from etude.kernels import delta_triton

        digest = delta_triton.digest(before, changes)
    else:
        digest = delta_reference.digest(before, changes)
    found = {field.name: getattr(changes, field.name) for field in fields(changes)}
    return Delta(**found, digest=digest)


def _visit(raw: Tensor, delta: Delta, *, total: int, writes: bool) -> tuple[Tensor, Tensor]:
    if uses_triton(raw):
        from etude.kernels import delta_triton

        return delta_triton.visit(raw, delta, total=total, writes=writes)
    return delta_reference.visit(raw, delta, total=total, writes=writes)


def _fit(before: Tensor, after: Tensor, *, tiles: Tiles, capacity: int) -> None:
    """Refuse words that a scan cannot compare along these tiles.

    Raises:
        ValueError: names what does not fit.
    """
    if capacity < 0:
        raise ValueError(f"capacity is {capacity}: it is at least 0")
    if not tiles.is_contiguous:
        raise ValueError("tiles are not contiguous: a scan reads a tensor in its own order")
    if before.device != after.device:
        raise ValueError(f"old is on {before.device}, new on {after.device}")
    _fits_tiles(before, tiles, name="old")


def _fits_tiles(raw: Tensor, tiles: Tiles, *, name: str) -> None:
    """Refuse words that these tiles do not describe.

    Raises:
        ValueError: width, device or length differ.
    """
    bits = 8 * raw.itemsize
    if bits != tiles.bits or raw.device != tiles.base.device:
        raise ValueError(
            f"{name} has {bits} bits on {raw.device}, tiles {tiles.bits} on {tiles.base.device}"
        )
    if raw.numel() < tiles.end:
        raise ValueError(f"{name} has {raw.numel()} elements, its tiles end at {tiles.end}")


def _target(live: Tensor, delta: Delta) -> tuple[Tensor, int]:
    """The live words, and how many entries the delta has.

    Raises:
        ValueError: the delta overflowed, or is not one of these words.
    """
    raw = words(live, name="live")
    _fits_tiles(raw, delta.tiles, name="live")
    _checked_columns(delta)
    total = int(delta.counts.sum())
    if delta.overflow:
        raise ValueError(f"the delta overflowed: {total} changes, room for {delta.index.numel()}")
    if total > delta.index.numel():
        raise ValueError(f"counts add up to {total}, index has {delta.index.numel()} entries")
    checked(delta, total=total)
    return raw, total


def _checked_columns(delta: Delta) -> None:
    """Refuse a delta whose columns do not belong together; looks at no value.

    Raises:
        ValueError: names the column.
    """
    tiles = delta.tiles
    kinds = (
        ("counts", delta.counts, torch.int32, tiles.base.numel()),
        ("starts", delta.starts, torch.int64, tiles.base.numel()),
        ("index", delta.index, torch.int32, delta.index.numel()),
        ("value", delta.value, UNSIGNED[tiles.bits // 8], delta.index.numel()),
    )
    for name, column, dtype, length in kinds:
        if column.dtype != dtype or column.shape != (length,) or not column.is_contiguous():
            raise ValueError(f"{name} is {column.dtype} {column.shape}, not {dtype} [{length}]")
        if column.device != tiles.base.device:
            raise ValueError(f"{name} is on {column.device}, tiles on {tiles.base.device}")
