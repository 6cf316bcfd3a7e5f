"""From staged blocks to patches: old words gathered, new ones computed, the digest predicted."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from etude.common.errors import CorruptError
from etude.common.weights import digest, placing
from etude.common.weights.codecs import l2
from etude.common.weights.codecs.ids import Codec
from etude.common.weights.digest import Digest
from etude.common.weights.holding import Holding
from etude.common.weights.jit import fixed
from etude.common.weights.layout import Layout
from etude.common.weights.placing import Grain, Integers, Window
from etude.common.weights.prepared import Patch, Prepared
from etude.common.weights.staged import StagedBlock
from etude.common.weights.ulp import top_bit
from etude.common.weights.words import Indices, Words, word_type

_SEGMENT = 1 << 31
"""Words of a parameter that share one base; a block spans no more than that."""


class _Cut(NamedTuple):
    """Where a block meets a region."""

    holding: Holding
    base: int


class _Found(NamedTuple):
    """The elements of one block in one region."""

    flats: Integers
    at: Indices
    old: Words
    new: Words


class _Growing:
    """The changes of one parameter, block after block, in memory that was taken once."""

    def __init__(self, word: np.dtype[np.unsignedinteger], most: int) -> None:
        # Pages that are never written cost nothing: most is a bound, not a size.
        self._at = np.empty(most, np.uint32)
        self._old = np.empty(most, word)
        self._new = np.empty(most, word)
        self._size = 0

    def add(self, found: _Found) -> None:
        stop = self._size + found.at.size
        self._at[self._size : stop] = found.at
        self._old[self._size : stop] = found.old
        self._new[self._size : stop] = found.new
        self._size = stop

    def patch(self, parameter: str, base: int) -> Patch:
        size = self._size
        return Patch(parameter, base, self._at[:size], self._old[:size], self._new[:size])


_Room = Mapping[tuple[str, int], _Growing]


class Preparation:
    """One prepare(); see LiveWeights."""

    def __init__(
        self, layout: Layout, words: Mapping[str, Words], held: Mapping[int, list[Holding]]
    ) -> None:
        self._layout = layout
        self._words = words
        self._held = held
        self._digest = digest.NOTHING
        self._changed = 0

    def run(self, blocks: Iterable[StagedBlock]) -> Prepared:
        """Gather everything."""
        known = self._layout.checked(list(blocks))
        met = [(block, list(self._cuts(block))) for block in known]
        room = self._room(met)
        patches = []
        for block, cuts in met:
            if cuts:
                decoded = block if block.payload is None else self._decoded(block)
                for cut in cuts:
                    patches += self._prepare(decoded, cut, room)
        patches += [growing.patch(*key) for key, growing in room.items()]
        held = tuple(patch for patch in patches if patch.old.size)
        return Prepared(held, self._digest, self._changed)

    def _cuts(self, block: StagedBlock) -> Iterator[_Cut]:
        held = self._held.get(block.tensor, [])
        if not held:
            return
        grain = self._layout.grain(block.tensor, block.tile)
        first, last = _flat(grain, block.lo), _flat(grain, block.hi - 1)
        for holding in held:
            region = holding.region
            if first < region.source_stop and last >= region.source_offset:
                near = _least(holding.window, first)
                base = near // _SEGMENT * _SEGMENT
                if _least(holding.window, last) - base >= 2 * _SEGMENT:
                    where = self._layout.where(block.tensor, block.tile)
                    raise ValueError(f"{where}: spans too much of {region.parameter!r}")
                yield _Cut(holding, base)

    def _room(self, met: list[tuple[StagedBlock, list[_Cut]]]) -> _Room:
        most: dict[tuple[str, int], int] = {}
        for block, cuts in met:
            for cut in cuts:
                key = (cut.holding.region.parameter, cut.base)
                most[key] = most.get(key, 0) + block.num_changed
        return {key: _Growing(self._words[key[0]].dtype, size) for key, size in most.items()}

    def _decoded(self, block: StagedBlock) -> StagedBlock:
        """A block that was handed over as in the container, by the words that are live."""
        found = l2.decode(
            block.payload or b"",
            self._old_tile(block),
            changed=block.changed,
            flags=block.flags,
            dtype=self._layout.schema.tensors[block.tensor].dtype,
            where=self._layout.where(block.tensor, block.tile),
            what="rans" if block.codec is Codec.L2R else "rice",
        )
        return block._replace(index=found.index, data=found.delta, payload=None)

    def _old_tile(self, block: StagedBlock) -> Words:
        size = block.hi - block.lo
        old = np.zeros(size, word_type(self._layout.schema.tensors[block.tensor].dtype))
        seen = np.zeros(size, np.bool_)
        grain = self._layout.grain(block.tensor, block.tile)
        is_whole = size == self._layout.elements(block.tensor, block.tile)
        for holding in self._held[block.tensor] if is_whole else ():
            words = self._words[holding.region.parameter]
            placing.fetch(words, grain, holding.window, old, seen)
        if not seen.all():
            where = self._layout.where(block.tensor, block.tile)
            raise ValueError(f"{where}: not whole on this rank, as its codec needs")
        return old

    def _prepare(self, block: StagedBlock, cut: _Cut, room: _Room) -> list[Patch]:
        """Add what a block changes in a region to its parameter, or return a patch of its own."""
        every = block.index is None or block.index.size == block.hi - block.lo
        found = self._found(block, cut)
        parameter = cut.holding.region.parameter
        if cut.holding.region.counted:
            span = self._layout.span(block)
            others = cut.holding.others
            count, a, b = placing.change(found.old, found.new, found.flats, span, others)
            self._digest = self._digest.plus(Digest(int(a), int(b)))
            self._changed += count
        if every:
            differs = found.old != found.new
            if _is_cheaper_whole(int(np.count_nonzero(differs)), found):
                return [Patch(parameter, cut.base, self._again(block, cut), *found[2:])]
            found = _Found(*(part[differs] for part in found))
        room[parameter, cut.base].add(found)
        return []

    def _found(self, block: StagedBlock, cut: _Cut) -> _Found:
        words = self._words[cut.holding.region.parameter]
        flats, picks = self._places(block, _index(block), cut.holding.window)
        at = _positions(flats, cut)
        old, new = np.empty(at.size, words.dtype), np.empty(at.size, words.dtype)
        placing.gather(words, cut.base, at, old)
        kind = placing.NEW if block.index is None else placing.ULP
        kind = placing.XOR if block.codec is Codec.XOR_ZSTD else kind
        ordered = self._layout.schema.tensors[block.tensor].is_ordered
        data = new if block.data is None else fixed(block.data)
        placing.renew(old, data, picks, kind, top_bit(words.dtype, ordered=ordered), new)
        return _Found(flats, at, old, new)

    def _places(
        self, block: StagedBlock, index: Indices, window: Window
    ) -> tuple[Integers, Integers]:
        flats = np.empty(index.size, np.int64)
        picks = np.empty(index.size, np.int64)
        span = self._layout.span(block)
        grain = self._layout.grain(block.tensor, block.tile)
        count = placing.place(fixed(index), span, grain, window, flats, picks)
        if count < 0:
            where = self._layout.where(block.tensor, block.tile)
            raise CorruptError(f"{where}: places do not increase inside the block")
        return flats[:count], picks[:count]

    def _again(self, block: StagedBlock, cut: _Cut) -> Callable[[], Indices]:
        """The positions of a whole block, worked out again whenever they are needed."""
        bare = block._replace(index=None, data=None)  # which need not stay in memory
        return lambda: _positions(self._places(bare, _index(bare), cut.holding.window)[0], cut)


def _index(block: StagedBlock) -> Indices:
    if block.index is None:
        return np.arange(block.hi - block.lo, dtype=np.uint32)
    return block.index


def _flat(grain: Grain, local: int) -> int:
    row, column = divmod(local, grain.columns)
    return grain.base + row * grain.stride + column


def _least(window: Window, flat: int) -> int:
    """No word that holds this element or a later one lies before it."""
    row, column = divmod(max(0, flat - window.source_offset), window.source_stride)
    return window.parameter_offset + row * window.parameter_stride + min(column, window.width - 1)


def _positions(flats: Integers, cut: _Cut) -> Indices:
    at = np.empty(flats.size, np.uint32)
    placing.positions(flats, cut.holding.window, cut.base, at)
    return at


def _is_cheaper_whole(changed: int, found: _Found) -> bool:
    """Whether all words of a dense block take less memory than the positions of the changed."""
    word = found.old.dtype.itemsize
    return found.at.size * 2 * word < changed * (4 + 2 * word)
