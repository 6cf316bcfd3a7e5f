"""Changes of words: what the bodies find and visit, and the check of its values."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from etude.kernels import dispatch
from etude.kernels.tiles import Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What turns old words into new ones, as absolute new values. N tiles.

    Tile t's changes are entries [starts[t], starts[t] + counts[t]) of index and value; entries
    beyond the last tile's are unspecified, and so are all of them after an overflow.
    """

    tiles: Tiles
    counts: Tensor
    """Changes of each tile, true also after an overflow. int32 [N]"""
    starts: Tensor
    """Of each tile's entries. int64 [N]"""
    index: Tensor
    """Places inside the tile, rising. int32 [capacity]"""
    value: Tensor
    """New raw bits. uint8, uint16 or uint32 [capacity]"""
    overflow: Tensor
    """Whether there were more changes than capacity: send dense blocks instead. bool []"""


class Entries(NamedTuple):
    """Every change by itself. k changes."""

    place: Tensor
    """In the buffer; 0 where the index lies outside its tile. int64 [k]"""
    lane: Tensor
    """In the global index; 0 likewise. int64 [k]"""
    inside: Tensor
    """Whether the index lies in its tile. bool [k]"""


def entries(changes: Changes, *, total: int) -> Entries:
    """Where each of the first `total` entries lies."""
    tiles = changes.tiles
    tile = torch.repeat_interleave(
        torch.arange(changes.counts.numel(), device=changes.counts.device),
        changes.counts.to(torch.int64),
        output_size=total,
    )
    local = changes.index[:total].to(torch.int64)
    inside = (local >= 0) & (local < tiles.elements[tile])
    local = torch.where(inside, local, 0)
    width = tiles.width[tile].to(torch.int64)
    row, column = local // width, local % width
    step = max(1, tiles.bits // 16)
    place = tiles.base[tile] + row * tiles.pitch[tile] + column
    lane = tiles.lane[tile] + row * tiles.lane_pitch[tile] + column * step
    return Entries(torch.where(inside, place, 0), torch.where(inside, lane, 0), inside)


def checked(changes: Changes, *, total: int) -> None:
    """Look at every count and index, if ETUDE_KERNELS_CHECK=1; waits for the device.

    Raises:
        ValueError: a count is negative, tiles' entries do not follow each other, an index lies
            outside its tile, or does not rise.
    """
    if not dispatch.CHECKED:
        return
    counts = changes.counts.to(torch.int64)
    if bool((counts < 0).any()) or not torch.equal(changes.starts, counts.cumsum(0) - counts):
        raise ValueError("counts and starts are not those of tiles that follow each other")
    if not bool(entries(changes, total=total).inside.all()):
        raise ValueError("index has an entry outside its tile")
    rises = changes.index[1:total] > changes.index[: max(total - 1, 0)]
    opens = torch.zeros(total + 1, dtype=torch.bool, device=counts.device)
    opens[changes.starts] = True
    if not bool((rises | opens[1:total]).all()):
        raise ValueError("index does not rise inside a tile")
