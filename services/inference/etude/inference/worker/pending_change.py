"""Pending changes of live words: held complete for undo, or computed piece by piece."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from etude.common.weights.replicas import staged_file
from etude.common.weights.replicas.regions import Region, Regions
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import Digest

PIECE_ELEMENTS = 1 << 23
"""Elements in flight while a version is written without the old words being kept."""

FREE_BYTES = 256 << 20
"""Memory that a version may always take."""

SHARE = 0.25
"""Above FREE_BYTES: this share of the rank's slice."""

BYTES_PER_ELEMENT = 2
"""Of a typical parameter; accurate enough for limits."""

log = logging.getLogger(__name__)


class GatheredChange(Protocol):
    """Result of one prepare() of live words."""

    @property
    def digest(self) -> Digest: ...
    @property
    def changed(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


_Found = TypeVar("_Found", bound=GatheredChange)


class LiveWords(Protocol[_Found]):
    """Live words, in host memory or on a device."""

    regions: dict[int, tuple[Region, ...]]

    def count(self, regions: Regions) -> None: ...
    def scan(self) -> Digest: ...
    def prepare(self, blocks: Iterable[StagedBlock]) -> _Found: ...
    def write(self, prepared: _Found) -> bool: ...
    def undo(self, prepared: _Found) -> bool: ...


class PendingChange(GatheredChange, Protocol):
    """The change from the live version to the next."""

    def write(self) -> bool: ...
    def undo(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class UndoableChange(Generic[_Found]):
    """Holds every old and new word."""

    live: LiveWords[_Found]
    prepared: _Found

    @property
    def digest(self) -> Digest:
        return self.prepared.digest

    @property
    def changed(self) -> int:
        return self.prepared.changed

    @property
    def num_bytes(self) -> int:
        return self.prepared.num_bytes

    def write(self) -> bool:
        """Write the new words; harmless when repeated."""
        return self.live.write(self.prepared)

    def undo(self) -> bool:
        """Write the old words; harmless when repeated, and after half a commit."""
        return self.live.undo(self.prepared)


class PiecewiseChange(Generic[_Found]):
    """Computes its words again, piece by piece, when it is written: too large to be held."""

    num_bytes = 0

    def __init__(self, live: LiveWords[_Found], path: Path) -> None:
        self._live = live
        self._path = path
        self.digest = digest.ZERO
        self.changed = 0
        for prepared in self._pieces():
            self.digest = self.digest.plus(prepared.digest)
            self.changed += prepared.changed

    def _pieces(self) -> Iterator[_Found]:
        for piece in split_blocks(staged_file.read_staged(self._path)):
            yield self._live.prepare(piece)

    def write(self) -> bool:
        """Write the new words."""
        return all(self._live.write(prepared) for prepared in self._pieces())

    def undo(self) -> bool:
        """Fail: the old words are gone."""
        return False


def split_blocks(blocks: list[StagedBlock]) -> Iterator[list[StagedBlock]]:
    """Split blocks into pieces, in order; blocks of one tile stay together."""
    piece: list[StagedBlock] = []
    size = 0
    for block in sorted(blocks, key=lambda block: block[:3]):
        if size >= PIECE_ELEMENTS and block[:2] != piece[-1][:2]:
            yield piece
            piece, size = [], 0
        piece.append(block)
        size += block.hi - block.lo
    if piece:
        yield piece


def prepare_change(live: LiveWords[Any], path: Path, *, keep_old: bool) -> PendingChange:
    """The change of a staged version; undoable if requested and not too large.

    Raises:
        CorruptError: the staged file is not a version's, or does not fit these words.
        ValueError: a block that only old words decode is not whole on this rank.
    """
    if not keep_old:
        return PiecewiseChange(live, path)
    blocks = staged_file.read_staged(path)
    needed, limit = _needed_bytes(live, blocks), _limit_bytes(live)
    if needed > limit:
        log.warning(
            "a version needs up to %d MiB besides the live weights, the limit is %d MiB: it is "
            "written piece by piece, and cannot be undone",
            needed >> 20,
            limit >> 20,
        )
        return PiecewiseChange(live, path)
    return UndoableChange(live, live.prepare(blocks))


def _num_elements(live: LiveWords[Any]) -> int:
    return sum(region.elements for held in live.regions.values() for region in held)


def _limit_bytes(live: LiveWords[Any]) -> int:
    """Memory limit of one version, by the size of the rank's slice."""
    return max(FREE_BYTES, int(_num_elements(live) * BYTES_PER_ELEMENT * SHARE))


def _needed_bytes(live: LiveWords[Any], blocks: Iterable[StagedBlock]) -> int:
    """Upper bound of a version's memory: indices, old words and new ones."""
    changed: Counter[int] = Counter()
    for block in blocks:
        changed[block.tensor] += block.num_changed
    held = {t: sum(region.elements for region in regions) for t, regions in live.regions.items()}
    most = sum(min(count, held.get(tensor, 0)) for tensor, count in changed.items())
    return most * (4 + 2 * BYTES_PER_ELEMENT)
