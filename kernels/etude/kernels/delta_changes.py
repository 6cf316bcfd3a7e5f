"""Changes of words: what the bodies find and visit."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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


class Steps(NamedTuple):
    """Where differences lead from live words. k entries."""

    old: Tensor
    """[k]"""
    new: Tensor
    """[k]"""
    digest: Tensor
    """What the changes add to the state digest. int64 [2]"""


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
