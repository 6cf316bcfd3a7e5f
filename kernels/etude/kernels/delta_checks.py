"""Checks that words, tiles and changes fit each other; errors name the field."""

import torch
from torch import Tensor

from etude.kernels import dispatch
from etude.kernels.delta_changes import WordChanges, change_positions
from etude.kernels.raw_words import UNSIGNED
from etude.kernels.tiles import Tiles


def fit_for_scan(before: Tensor, after: Tensor, *, tiles: Tiles, capacity: int) -> None:
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
    fit_tiles(before, tiles, name="old")


def fit_tiles(raw: Tensor, tiles: Tiles, *, name: str) -> None:
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


def fit_columns(changes: WordChanges) -> None:
    """Refuse changes whose columns do not belong together; looks at no value.

    Raises:
        ValueError: names the column.
    """
    tiles = changes.tiles
    kinds = (
        ("counts", changes.counts, torch.int32, tiles.base.numel()),
        ("starts", changes.starts, torch.int64, tiles.base.numel()),
        ("index", changes.index, torch.int32, changes.index.numel()),
        ("value", changes.value, UNSIGNED[tiles.bits // 8], changes.index.numel()),
    )
    for name, column, dtype, length in kinds:
        if column.dtype != dtype or column.shape != (length,) or not column.is_contiguous():
            raise ValueError(f"{name} is {column.dtype} {column.shape}, not {dtype} [{length}]")
        if column.device != tiles.base.device:
            raise ValueError(f"{name} is on {column.device}, tiles on {tiles.base.device}")


def fit_values(changes: WordChanges, *, total: int) -> None:
    """Look at every count and index, if ETUDE_KERNELS_CHECK=1; waits for the device.

    Raises:
        ValueError: tiles' entries do not follow each other, or an index lies outside its tile or
            does not rise.
    """
    if not dispatch.CHECKED:
        return
    counts = changes.counts.to(torch.int64)
    if not torch.equal(changes.starts, counts.cumsum(0) - counts):
        raise ValueError("counts and starts are not those of tiles that follow each other")
    if not bool(change_positions(changes, total=total).inside.all()):
        raise ValueError("index has an entry outside its tile")
    rises = changes.index[1:total] > changes.index[: max(total - 1, 0)]
    opens = torch.zeros(total + 1, dtype=torch.bool, device=counts.device)
    opens[changes.starts] = True
    if not bool((rises | opens[1:total]).all()):
        raise ValueError("index does not rise inside a tile")
