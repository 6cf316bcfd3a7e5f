"""Decoding of tiles whose codec needs the live words."""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from etude.common.weights.coding.codecs import l2
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas.block_layout import BlockLayout
from etude.common.weights.replicas.regions import HeldRegion
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors.words import Words, word_type

Fill = Callable[[StagedBlock, HeldRegion, Words, npt.NDArray[np.bool_]], None]
"""Puts the words of a block that covers its tile into an array, as far as a region holds them,
and marks which it held.  [n], [n]."""


def decode_block(
    block: StagedBlock, *, layout: BlockLayout, held: Iterable[HeldRegion], fill: Fill
) -> StagedBlock:
    """The block as if the receiver had decoded it; the same one if it had.

    Args:
        block: of the layout.
        layout: of the schema.
        held: the regions of its tensor on this rank.
        fill: reads them.

    Raises:
        CorruptError: its payload is damaged.
        ValueError: its tile is not whole on this rank.
    """
    if block.payload is None:
        return block
    spec = layout.schema.tensors[block.tensor]
    where = layout.describe(block.tensor, block.tile)
    size = block.hi - block.lo
    old = np.zeros(size, word_type(spec.dtype))
    seen = np.zeros(size, np.bool_)
    if size == layout.elements(block.tensor, block.tile):
        for holding in held:
            fill(block, holding, old, seen)
    if not seen.all():
        raise ValueError(f"{where}: not whole on this rank, as its codec needs")
    found = l2.decode(
        block.payload,
        old,
        changed=block.changed,
        flags=block.flags,
        dtype=spec.dtype,
        where=where,
        what="rans" if block.codec is Codec.L2R else "rice",
    )
    return block._replace(index=found.index, data=found.delta, payload=None)
