"""Preparation of patches from staged blocks: old and new words, predicted digest."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas import gather_kernels, region_kernels
from etude.common.weights.replicas.block_layout import BlockLayout
from etude.common.weights.replicas.gather_kernels import ChangedElements, CodedElements
from etude.common.weights.replicas.patches import Patch, PreparedPatches
from etude.common.weights.replicas.region_kernels import RegionWindow, TileRows
from etude.common.weights.replicas.regions import HeldRegion
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.replicas.tile_decoding import decode_block
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.jit import readonly
from etude.common.weights.tensors.ulp import top_bit
from etude.common.weights.tensors.words import Indices, Words

_SEGMENT = 1 << 31
"""Words of a parameter that share one base; a block spans no more than that."""


class _Cut(NamedTuple):
    """Overlap of a block and a region."""

    holding: HeldRegion
    grain: TileRows
    base: int


class _PatchBuffer:
    """The changes of one parameter, block after block, in memory that was taken once."""

    def __init__(self, word: np.dtype[np.unsignedinteger], most: int) -> None:
        # Pages that are never written cost nothing: most is a bound, not a size.
        self._whole = _room_for(most, word)
        self._size = 0

    def free(self, most: int) -> ChangedElements:
        """Space for `most` more changes, to be written in place."""
        return ChangedElements(*(part[self._size : self._size + most] for part in self._whole))

    def advance(self, count: int) -> None:
        """Count the first changes of the free space as written."""
        self._size += count

    def patch(self, parameter: str, base: int) -> Patch:
        return Patch(parameter, base, *(part[: self._size] for part in self._whole))


def _room_for(most: int, word: np.dtype[np.unsignedinteger]) -> ChangedElements:
    return ChangedElements(np.empty(most, np.uint32), np.empty(most, word), np.empty(most, word))


_Room = Mapping[tuple[str, int], _PatchBuffer]


class Preparation:
    """One prepare(); see LiveWeights."""

    def __init__(
        self, layout: BlockLayout, words: Mapping[str, Words], held: Mapping[int, list[HeldRegion]]
    ) -> None:
        self._layout = layout
        self._words = words
        self._held = held
        self._digest = digest.ZERO
        self._changed = 0

    def run(self, blocks: Iterable[StagedBlock]) -> PreparedPatches:
        checked = self._layout.sort_blocks(list(blocks))
        met = [(block, list(self._cuts(block))) for block in checked]
        room = self._room(met)
        patches = []
        for block, cuts in met:
            if cuts:
                held = self._held[block.tensor]
                known = decode_block(block, layout=self._layout, held=held, fill=self._fill)
                for cut in cuts:
                    patches += self._prepare(known, cut, room)
        patches += [growing.patch(*key) for key, growing in room.items()]
        changing = tuple(patch for patch in patches if patch.old.size)
        return PreparedPatches(changing, self._digest, self._changed)

    def _cuts(self, block: StagedBlock) -> Iterator[_Cut]:
        held = self._held.get(block.tensor, [])
        if not held:
            return
        grain = self._layout.tile_rows(block.tensor, block.tile)
        first, last = _flat(grain, block.lo), _flat(grain, block.hi - 1)
        for holding in held:
            region = holding.region
            if first < region.source_stop and last >= region.source_offset:
                near = _first_word(holding.window, first)
                base = near // _SEGMENT * _SEGMENT
                if _first_word(holding.window, last) - base >= 2 * _SEGMENT:
                    where = self._layout.describe(block.tensor, block.tile)
                    raise ValueError(f"{where}: spans too much of {region.parameter!r}")
                yield _Cut(holding, grain, base)

    def _room(self, met: list[tuple[StagedBlock, list[_Cut]]]) -> _Room:
        most: dict[tuple[str, int], int] = {}
        for block, cuts in met:
            for cut in cuts:
                key = (cut.holding.region.parameter, cut.base)
                most[key] = most.get(key, 0) + block.num_changed
        return {key: _PatchBuffer(self._words[key[0]].dtype, size) for key, size in most.items()}

    def _fill(
        self, block: StagedBlock, holding: HeldRegion, old: Words, seen: npt.NDArray[np.bool_]
    ) -> None:
        grain = self._layout.tile_rows(block.tensor, block.tile)
        words = self._words[holding.region.parameter]
        region_kernels.fetch_tile(words, grain, holding.window, old, seen)

    def _prepare(self, block: StagedBlock, cut: _Cut, room: _Room) -> list[Patch]:
        """Add what a block changes in a region to its parameter, or return a patch of its own."""
        parameter = cut.holding.region.parameter
        growing = room[parameter, cut.base]
        size = block.hi - block.lo
        every = block.index is None or block.index.size == size
        free = growing.free(block.num_changed)
        found = _room_for(size, free.old.dtype) if every else free
        count = self._gather(block, cut, found)
        found = ChangedElements(*(part[:count] for part in found))
        if every:
            differs = found.old != found.new
            changed = int(np.count_nonzero(differs))
            if _is_cheaper_whole(changed, found):
                return [Patch(parameter, cut.base, self._again(block, cut), found.old, found.new)]
            for part, target in zip(found, free, strict=True):
                np.compress(differs, part, out=target[:changed])
            found = ChangedElements(*(part[:changed] for part in free))
        growing.advance(found.at.size)
        return []

    def _gather(self, block: StagedBlock, cut: _Cut, found: ChangedElements) -> int:
        """Fill what is found; how many elements."""
        kind = gather_kernels.NEW if block.index is None else gather_kernels.ULP
        kind = gather_kernels.XOR if block.codec is Codec.XOR_ZSTD else kind
        ordered = self._layout.schema.tensors[block.tensor].is_ordered
        data = found.new if block.data is None else block.data
        holding = cut.holding
        top = top_bit(found.new.dtype, ordered=ordered)
        gathered = gather_kernels.gather(
            CodedElements(readonly(block.element_places), readonly(data), kind, top),
            self._layout.span(block),
            cut.grain,
            holding.window,
            holding.others,
            self._words[holding.region.parameter],
            cut.base,
            found,
        )
        if gathered.held < 0:
            raise self._not_increasing(block)
        if holding.region.counted:
            self._digest = self._digest.plus(Digest(int(gathered.a), int(gathered.b)))
            self._changed += gathered.changed
        return int(gathered.held)

    def _not_increasing(self, block: StagedBlock) -> CorruptError:
        where = self._layout.describe(block.tensor, block.tile)
        return CorruptError(f"{where}: places do not increase inside the block")

    def _again(self, block: StagedBlock, cut: _Cut) -> Callable[[], Indices]:
        """The positions of a whole block, worked out again whenever they are needed."""
        bare = block._replace(index=None, data=None)  # which need not stay in memory
        return lambda: self._positions(bare, cut)

    def _positions(self, block: StagedBlock, cut: _Cut) -> Indices:
        index = block.element_places
        flats, picks = np.empty(index.size, np.int64), np.empty(index.size, np.int64)
        span = self._layout.span(block)
        count = region_kernels.place_elements(
            readonly(index), span, cut.grain, cut.holding.window, flats, picks
        )
        at = np.empty(count, np.uint32)
        region_kernels.positions(flats[:count], cut.holding.window, cut.base, at)
        return at


def _flat(grain: TileRows, local: int) -> int:
    row, column = divmod(local, grain.columns)
    return grain.base + row * grain.stride + column


def _first_word(window: RegionWindow, flat: int) -> int:
    """No word that holds this element or a later one lies before it."""
    row, column = divmod(max(0, flat - window.source_offset), window.source_stride)
    return window.parameter_offset + row * window.parameter_stride + min(column, window.width - 1)


def _is_cheaper_whole(changed: int, found: ChangedElements) -> bool:
    """Return true if all words of a dense block take less memory than positions of the changed."""
    word = found.old.dtype.itemsize
    return found.at.size * 2 * word < changed * (4 + 2 * word)
