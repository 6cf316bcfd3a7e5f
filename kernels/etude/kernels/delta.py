"""Deltas of weights on the device: find changes, predict their digest, apply and undo them.

Words are raw bits: nothing here rounds, except `cast_scan`, which rounds the fp32 master once. All
results are exact and in one order (tile, then place in it), whatever the launch. A delta holds
absolute new values, so that applying it twice is the same as once.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from etude.kernels import delta_checks, delta_reference
from etude.kernels.delta_changes import WordChanges
from etude.kernels.dispatch import uses_triton
from etude.kernels.raw_words import Axis, raw_words
from etude.kernels.tiles import Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(WordChanges):
    """Changes, and their difference to the state digest."""

    digest: Tensor
    """Difference to the state digest, 0 after an overflow (lanes as in `digest_scan`). int64 [2]"""
    total: int | None = None
    """Number of changes, once it was read from the device: later calls do not wait for it."""


class CastScan(NamedTuple):
    """Result of `cast_scan`: the rounded weights and their delta."""

    new: Tensor
    """The master rounded to bf16, shaped as it."""
    delta: Delta


class ResolvedDelta(NamedTuple):
    """A delta of differences, resolved against the live words."""

    delta: Delta
    """The same changes as new raw bits, safe to apply again and again; its digest is known."""
    old: Tensor
    """The live values that it replaces, in the order of its entries; also the undo record. [k]"""


class PreparedDelta(NamedTuple):
    """Effect of a delta on live words. k changes."""

    old: Tensor
    """The live values that it replaces, in the order of its entries; also the undo record. [k]"""
    digest: Tensor
    """Difference to the state digest. int64 [2]"""


def delta_scan(old: Tensor, new: Tensor, *, tiles: Tiles, capacity: int) -> Delta:
    """Find the changes from one tensor to another. Does not wait for the device.

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
    before, after = raw_words(old, name="old"), raw_words(new, name="new")
    delta_checks.fit_for_scan(before, after, tiles=tiles, capacity=capacity)
    if uses_triton(before):
        from etude.kernels import delta_scan_triton

        changes = delta_scan_triton.scan(before, after, tiles=tiles, capacity=capacity)
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
    source, before = raw_words(master, name="master"), raw_words(old, name="old")
    delta_checks.fit_for_scan(before, source, tiles=tiles, capacity=capacity)
    if uses_triton(before):
        from etude.kernels import delta_scan_triton

        new, changes = delta_scan_triton.cast_scan(source, before, tiles=tiles, capacity=capacity)
    else:
        new, changes = delta_reference.cast_scan(source, before, tiles=tiles, capacity=capacity)
    rounded = new.view(torch.bfloat16).view(master.shape)
    return CastScan(rounded, _with_digest(before, changes))


def staged_delta(tiles: Tiles, *, counts: Tensor, index: Tensor, value: Tensor) -> Delta:
    """A delta from the wire; its digest is zero until `delta_prepare` reads the old words.

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
        value=raw_words(value, name="value"),
        overflow=torch.zeros((), dtype=torch.bool, device=device),
        digest=torch.zeros(2, dtype=torch.int64, device=device),
    )
    delta_checks.fit_columns(delta)
    return delta


def delta_resolve(live: Tensor, *, delta: Delta, axis: Axis) -> ResolvedDelta:
    """Prepare a delta whose values are differences from the live words; writes nothing.

    Differences can be folded and inverted without weights, but must not be applied twice.

    Args:
        live: the words of the base version.
        delta: its values are differences, as words; `staged_delta` makes one.
        axis: what the differences count.

    Raises:
        ValueError: live does not fit the delta, the delta overflowed, or the axis is ABSOLUTE.
    """
    if axis is Axis.ABSOLUTE:
        raise ValueError("axis is ABSOLUTE: the values are new raw bits already")
    raw, total = _check_target(live, delta)
    if uses_triton(raw):
        from etude.kernels import delta_triton

        old, new, digest = delta_triton.resolve(raw, delta, total=total, axis=axis)
    else:
        old, new, digest = delta_reference.resolve(raw, delta, total=total, axis=axis)
    absolute = replace(delta, index=delta.index[:total], value=new, digest=digest, total=total)
    return ResolvedDelta(absolute, old)


def delta_prepare(live: Tensor, *, delta: Delta) -> PreparedDelta:
    """Gather what a delta would overwrite and predict the digest; writes nothing.

    Waits for the device once, to learn the number of changes, unless `check_delta` did.
    Entries outside their tile are skipped (old 0, digest 0); with ETUDE_KERNELS_CHECK=1 they
    are refused.

    Raises:
        ValueError: live does not fit the delta, or the delta overflowed.
    """
    raw, total = _check_target(live, delta)
    return PreparedDelta(*_visit(raw, delta, total=total, writes=False))


def check_delta(live: Tensor, *, delta: Delta) -> Delta:
    """Check that a delta fits; later calls with the result do not wait for the device.

    Raises:
        ValueError: live does not fit the delta, or the delta overflowed.
    """
    _, total = _check_target(live, delta)
    return replace(delta, index=delta.index[:total], value=delta.value[:total], total=total)


def delta_apply(live: Tensor, *, delta: Delta) -> Tensor:
    """Overwrite live words, in place; safe to repeat.

    The caller keeps others from reading and writing `live` meanwhile; autograd is not told, so no
    graph that saved `live` may be open. Elements that the delta does not name are left alone.

    Returns:
        The values overwritten, in the order of the entries. [k]

    Raises:
        ValueError: live does not fit the delta, or the delta overflowed.
    """
    raw, total = _check_target(live, delta)
    return _visit(raw, delta, total=total, writes=True)[0]


def delta_undo(live: Tensor, *, delta: Delta, old: Tensor) -> Tensor:
    """Write the old values of `delta_prepare` back, in place; safe to repeat.

    Returns:
        The values overwritten: the delta's, where it had been applied. [k]

    Raises:
        ValueError: live or old does not fit the delta, or the delta overflowed.
    """
    raw, total = _check_target(live, delta)
    if old.dtype != raw.dtype or old.shape != (total,) or old.device != raw.device:
        raise ValueError(
            f"old is {old.dtype} {old.shape} on {old.device}, not {raw.dtype} [{total}]"
        )
    return _visit(raw, replace(delta, value=old), total=total, writes=True)[0]


def _with_digest(before: Tensor, changes: WordChanges) -> Delta:
    """The delta of a scan; gathers the old words again, at the changes only."""
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


def _check_target(live: Tensor, delta: Delta) -> tuple[Tensor, int]:
    """The live words, and the number of the delta's entries.

    Raises:
        ValueError: the delta overflowed, or does not fit these words.
    """
    raw = raw_words(live, name="live")
    delta_checks.fit_tiles(raw, delta.tiles, name="live")
    delta_checks.fit_columns(delta)
    if delta.total is not None:
        return raw, delta.total
    counts = delta.counts
    # One answer from the device, not three.
    seen = torch.stack([counts.sum(), counts.clamp(max=0).sum(), delta.overflow.to(torch.int64)])
    total, negative, overflow = seen.tolist()
    if overflow:
        raise ValueError(f"the delta overflowed: {total} changes, room for {delta.index.numel()}")
    if negative:
        raise ValueError("counts has a negative entry")
    if total > delta.index.numel():
        raise ValueError(f"counts add up to {total}, index has {delta.index.numel()} entries")
    delta_checks.fit_values(delta, total=total)
    return raw, total
