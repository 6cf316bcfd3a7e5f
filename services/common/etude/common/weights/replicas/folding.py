"""A way over several versions as one complete version: its end is staged, and nothing between."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from etude.common.weights.coding.codecs.ids import WHOLE_TENSOR, Codec
from etude.common.weights.protocol.plan import Edge
from etude.common.weights.replicas import staged
from etude.common.weights.replicas.mirror import Mirror, Whole
from etude.common.weights.replicas.staged import StagedBlock
from etude.common.weights.tensors.tiles import TILE_ELEMENTS


def stage_end(edges: Sequence[Edge], mirror: Mirror, path: Path, tensors: Collection[int]) -> None:
    """Take a way on disk, and stage where it ends.

    Args:
        edges: the way; the first one is complete.
        mirror: room for a whole copy of the model.
        path: of the file for the workers.
        tensors: places in the schema of those that are held here at all.

    Raises:
        DamagedEdgeError: a step is damaged in the store, or leads to another state.
        MissingError: an object was collected.
        StoreError: the store failed.
    """
    for edge in edges:
        mirror.take(edge)
    staged.write(path, _complete(mirror.whole(), tensors))


def _complete(whole: Whole, tensors: Collection[int]) -> Iterator[StagedBlock]:
    for tensor, spec in enumerate(whole.schema.tensors):
        words = whole.words[spec.name]
        for lo in range(0, spec.elements, TILE_ELEMENTS) if tensor in tensors else ():
            data = words[lo : lo + TILE_ELEMENTS]
            yield StagedBlock(tensor, WHOLE_TENSOR, lo, lo + data.size, Codec.DENSE, None, data)
