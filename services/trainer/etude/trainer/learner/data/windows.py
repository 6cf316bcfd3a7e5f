"""Windows of a dataset: blocks in a shuffled order, encoded together and packed into rows.

A window is a function of the files, the seed and its place alone, whatever the number of ranks:
each rank encodes some of its blocks, and all ranks exchange what they encoded.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from etude.common.errors import EtudeError
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.data.blocks import read_block
from etude.trainer.learner.data.files import Block
from etude.trainer.learner.data.jsonl_blocks import JsonRow
from etude.trainer.seeding import derive_seed, permute_index

T = TypeVar("T")

WINDOW_BYTES = 64 << 20
"""Bytes of files in a window, at least one block: about 16 million tokens of English text. With
100 rows or more best-fit packing leaves less than 1 % empty."""

Encoder = Callable[[JsonRow], Iterable[SupervisedSequence]]
"""Turns one row of a file into sequences of at most a row's capacity."""


class EncodedShare(NamedTuple):
    """One rank's encoded blocks of a window, or its error."""

    blocks: list[list[SupervisedSequence]]
    error: EtudeError | None = None


class RankExchange(Protocol):
    """The ranks that read one dataset together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_objects(self, value: T) -> list[T]:
        """Gather one value of each rank, in rank order; collective."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A rank that reads alone."""

    rank: int = 0
    size: int = 1

    def gather_objects(self, value: T) -> list[T]:
        return [value]


class WindowPlace(NamedTuple):
    """Position of a window: a pass over the data, and the first of its blocks in their order."""

    pass_number: int = 0
    block: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One window's rows of packed sequences, in the order in which they are trained."""

    rows: tuple[tuple[SupervisedSequence, ...], ...]
    following: WindowPlace
    fill: float
    """Share of the rows' capacity that holds tokens."""


@dataclass(slots=True, kw_only=True)
class WindowReader:
    """Reads the windows of one dataset."""

    blocks: Sequence[Block]
    encode: Encoder
    ranks: RankExchange
    capacity: int
    """Tokens of a row."""
    seed: int
    window_bytes: int = WINDOW_BYTES
    _encoded: dict[WindowPlace, EncodedShare] = field(default_factory=dict)
    """This rank's blocks of windows that were encoded ahead."""

    def encode_ahead(self, place: WindowPlace) -> None:
        """Read and encode this rank's blocks of a window; not collective, for a thread."""
        self._encoded[place] = self._encode_own(place)

    def read(self, place: WindowPlace) -> Window:
        """Read a window; collective, and fails on all ranks alike.

        Raises:
            UserError: a row cannot be used; it is named.
            StoreError: the store does not answer.
        """
        own = self._encoded.pop(place, None)
        if own is None or own.error is not None:  # a store may answer the second time
            own = self._encode_own(place)
        gathered = self.ranks.gather_objects(own)
        for each in gathered:
            if each.error is not None:
                raise each.error
        shares = [each.blocks for each in gathered]
        num_blocks, num_ranks = len(self._members(place)), self.ranks.size
        in_order = [shares[index % num_ranks][index // num_ranks] for index in range(num_blocks)]
        return self._pack(place, [sequence for block in in_order for sequence in block])

    def following(self, place: WindowPlace) -> WindowPlace:
        """The place of the next window."""
        after = place.block + len(self._members(place))
        if after >= len(self.blocks):
            return WindowPlace(place.pass_number + 1, 0)
        return WindowPlace(place.pass_number, after)

    def _members(self, place: WindowPlace) -> list[Block]:
        """Blocks of a window, in the order of its pass."""
        members: list[Block] = []
        total = 0
        seed = derive_seed(self.seed, "blocks", place.pass_number)
        for position in range(place.block, len(self.blocks)):
            index = permute_index(position, size=len(self.blocks), seed=seed)
            members.append(self.blocks[index])
            total += self.blocks[index].num_bytes
            if total >= self.window_bytes:
                break
        return members

    def _encode_own(self, place: WindowPlace) -> EncodedShare:
        own = self._members(place)[self.ranks.rank :: self.ranks.size]
        try:
            return EncodedShare([list(self._sequences(block)) for block in own])
        except EtudeError as error:
            # Raised on all ranks: one that raised alone would leave the others in a collective.
            return EncodedShare([], error)

    def _sequences(self, block: Block) -> Iterator[SupervisedSequence]:
        for row in read_block(block):
            yield from self.encode(row)

    def _pack(self, place: WindowPlace, sequences: Sequence[SupervisedSequence]) -> Window:
        lengths = [sequence.token_ids.size for sequence in sequences]
        packed = pack_best_fit(lengths, capacity=self.capacity)
        seed = derive_seed(self.seed, "rows", place.pass_number, place.block)
        # Best fit begins with the longest sequences: rows are trained in a shuffled order.
        order = [permute_index(i, size=len(packed), seed=seed) for i in range(len(packed))]
        return Window(
            rows=tuple(tuple(sequences[index] for index in packed[row]) for row in order),
            following=self.following(place),
            fill=fill_ratio(packed, lengths, capacity=self.capacity),
        )


def pack_best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Pack sequences into rows, longest first, each into the fullest row that still has room.

    Args:
        lengths: tokens of each sequence, each at most the capacity.
        capacity: tokens of a row.

    Returns:
        Indices of the sequences of each row.

    Raises:
        ValueError: a sequence is longer than a row.

    Source: best-fit decreasing needs at most 11/9 of the fewest rows plus one (Johnson 1973,
    https://doi.org/10.1016/S0022-0000(74)80026-7).
    """
    rows: list[list[int]] = []
    # (room, row), sorted by room: the first entry with enough room is the best fit.
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"sequence {index} has {length} tokens, a row holds {capacity}")
        at = bisect.bisect_left(rooms, (length, -1))
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room, row = rooms.pop(at)
        rows[row].append(index)
        if room > length:
            bisect.insort(rooms, (room - length, row))
    return rows


def fill_ratio(rows: Sequence[Sequence[int]], lengths: Sequence[int], *, capacity: int) -> float:
    """Share of the rows' capacity that holds tokens; 1 for no rows."""
    if not rows:
        return 1.0
    return sum(lengths[index] for row in rows for index in row) / (capacity * len(rows))
