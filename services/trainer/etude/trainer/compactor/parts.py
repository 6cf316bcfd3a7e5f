"""Split of a model, or of its changes, into objects of bounded size."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.trainer.export.tile_grouping import Shard

PART_BYTES = 128 << 20
"""Size of one object before compression, packed and uploaded at a time."""


class Portion(NamedTuple):
    """A range of one tensor that goes into one part."""

    tensor: int
    shard: Shard


def split_parts(
    schema: Schema, sizes: Sequence[int], *, part_bytes: int = PART_BYTES
) -> Iterator[list[Portion]]:
    """Split every tensor with a size into objects of about the given size.

    Tensors that are larger are cut between tiles, or between rows where tiles lie side by side.
    """
    part: list[Portion] = []
    filled = 0
    for tensor, size in enumerate(sizes):
        if not size:
            continue
        shards = _shards(schema, tensor, pieces=-(-size // part_bytes))
        for shard in shards:
            share = -(-size // len(shards))
            if part and filled + share > part_bytes:
                yield part
                part, filled = [], 0
            part.append(Portion(tensor, shard))
            filled += share
    if part:
        yield part


def _shards(schema: Schema, tensor: int, *, pieces: int) -> list[Shard]:
    spec = schema.tensors[tensor]
    grain = _grain(schema, spec)
    grains = -(-spec.elements // grain)
    step = -(-grains // pieces) * grain
    starts = range(0, spec.elements, step)
    return [Shard(start, min(start + step, spec.elements)) for start in starts]


def _grain(schema: Schema, spec: TensorSpec) -> int:
    """Elements that stay together."""
    cut = tiling(spec, schema.grid)
    if cut.is_contiguous() and cut.panel_rows % cut.band == 0:
        return max(1, cut.band * cut.columns)
    return max(1, cut.columns)
