"""Changes of words, as the reference and the Triton bodies exchange them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from etude.kernels.tiles import Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class WordChanges:
    """The words that differ, as absolute new values. N tiles.

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
    """True if there are more changes than capacity: send dense blocks instead. bool []"""


class ChangePositions(NamedTuple):
    """Positions of single changes. k changes."""

    place: Tensor
    """Index in the buffer; 0 where the index lies outside its tile. int64 [k]"""
    lane: Tensor
    """Lane in the global index; 0 where the index lies outside its tile. int64 [k]"""
    inside: Tensor
    """True where the index lies in its tile. bool [k]"""


class ResolvedWords(NamedTuple):
    """Live words and the words that differences lead to. k entries."""

    old: Tensor
    """[k]"""
    new: Tensor
    """[k]"""
    digest: Tensor
    """Difference to the state digest. int64 [2]"""


def change_positions(changes: WordChanges, *, total: int) -> ChangePositions:
    """Positions of the first `total` entries."""
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
    return ChangePositions(torch.where(inside, place, 0), torch.where(inside, lane, 0), inside)
