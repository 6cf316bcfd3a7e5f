"""Layout of blocks: the tiles of every tensor of a schema, computed once."""

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs.ids import WHOLE_TENSOR
from etude.common.weights.replicas.region_kernels import TileRows, TileSpan, tile_rows
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.tiles import Tiling, tiling
from etude.common.weights.tensors.words import word_type


class BlockLayout:
    """The tiles of all tensors, and the check of their blocks."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._tilings: dict[int, Tiling] = {}

    def tiling(self, tensor: int) -> Tiling:
        if tensor not in self._tilings:
            self._tilings[tensor] = tiling(self.schema.tensors[tensor], self.schema.grid)
        return self._tilings[tensor]

    def elements(self, tensor: int, tile: int) -> int:
        """Elements of a tile, or of the whole tensor; 0 if there is no such tile."""
        if tile == WHOLE_TENSOR:
            return self.schema.tensors[tensor].elements
        cut = self.tiling(tensor)
        return cut.tile(tile).elements if 0 <= tile < cut.tiles else 0

    def tile_rows(self, tensor: int, tile: int) -> TileRows:
        if tile == WHOLE_TENSOR:
            size = self.schema.tensors[tensor].elements
            return TileRows(0, size, size)
        return tile_rows(self.tiling(tensor), tile)

    def span(self, block: StagedBlock) -> TileSpan:
        """Range of its tile that a block covers."""
        return TileSpan(block.lo, block.hi, self.schema.offsets[block.tensor])

    def describe(self, tensor: int, tile: int) -> str:
        """Names a tile in errors."""
        return f"tensor {self.schema.tensors[tensor].name!r}, tile {tile}"

    def sort_blocks(self, blocks: list[StagedBlock]) -> list[StagedBlock]:
        """The blocks, sorted.

        Raises:
            CorruptError: one that its tensor cannot have, or two that overlap.
        """
        known = sorted(blocks, key=lambda block: block[:3])
        previous: StagedBlock | None = None
        for block in known:
            self._check(block)
            if previous and block[:2] == previous[:2] and block.lo < previous.hi:
                where = self.describe(block.tensor, block.tile)
                raise CorruptError(f"{where}: two blocks hold element {block.lo}")
            previous = block
        return known

    def _check(self, block: StagedBlock) -> None:
        if not 0 <= block.tensor < len(self.schema.tensors):
            raise CorruptError(f"tensor {block.tensor}: there is none")
        if not 0 <= block.lo < block.hi <= self.elements(block.tensor, block.tile):
            where = self.describe(block.tensor, block.tile)
            raise CorruptError(f"{where}: there is no range [{block.lo}, {block.hi})")
        if block.data is None:
            return
        dtype = self.schema.tensors[block.tensor].dtype
        size = block.hi - block.lo if block.index is None else block.index.size
        if block.data.dtype != word_type(dtype):
            where = self.describe(block.tensor, block.tile)
            raise CorruptError(f"{where}: words of {block.data.dtype}, not of {dtype}")
        if block.data.size != size:
            where = self.describe(block.tensor, block.tile)
            raise CorruptError(f"{where}: {block.data.size} words for {size} elements")
