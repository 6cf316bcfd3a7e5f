"""Staging of the end of a path over several versions, as one complete version."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.protocol.plan import Edge
from etude.common.weights.replicas import staged_file
from etude.common.weights.replicas.mirror import Mirror, MirroredVersion
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors.schema import TensorSpec
from etude.common.weights.tensors.tiles import Tiling, tiling
from etude.common.weights.tensors.words import Words


def stage_path_end(
    edges: Sequence[Edge], mirror: Mirror, path: Path, tensors: Collection[int]
) -> None:
    """Apply a path to a copy of the model on disk, and stage the result.

    Args:
        edges: the path; the first one is complete.
        mirror: a complete copy of the model.
        path: of the file for the workers.
        tensors: schema indices of the tensors that this engine holds elements of.

    Raises:
        DamagedEdgeError: a step is damaged in the store, or leads to another state.
        MissingError: an object was collected.
        StoreError: the store failed.
    """
    for edge in edges:
        mirror.apply_edge(edge)
    staged_file.write_blocks(path, _complete(mirror.current_version(), tensors))


def _complete(whole: MirroredVersion, tensors: Collection[int]) -> Iterator[StagedBlock]:
    for tensor, spec in enumerate(whole.schema.tensors):
        if tensor in tensors and spec.elements:
            cut = tiling(spec, whole.schema.grid)
            for number, data in enumerate(_tiles(whole.words[spec.name], spec, cut)):
                yield StagedBlock(tensor, number, 0, data.size, Codec.DENSE, None, data)


def _tiles(words: Words, spec: TensorSpec, cut: Tiling) -> Iterator[Words]:
    """The words of each tile, in its own order."""
    planes = words[: spec.elements].reshape(cut.planes, cut.rows, cut.columns)
    for number in range(cut.tiles):
        tile = cut.tile(number)
        rows = slice(tile.row, tile.row + tile.rows)
        columns = slice(tile.column, tile.column + tile.columns)
        yield planes[tile.plane, rows, columns].reshape(-1)
