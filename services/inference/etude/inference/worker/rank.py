"""The weights of one rank through the two phases of a swap: prepared, written, taken back.

Every answer is made of plain values, which cross a process as they are.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypedDict, TypeVar

from etude.common.errors import CorruptError
from etude.common.weights import digest, staged
from etude.common.weights.digest import Digest
from etude.common.weights.regions import Region, Regions
from etude.common.weights.schema import Schema, parse_schema
from etude.common.weights.staged import StagedBlock
from etude.inference import coverage
from etude.inference.coverage import ComputedError

PIECE_ELEMENTS = 1 << 23
"""Elements in flight while a version is written without the old words being kept."""

FREE_BYTES = 256 << 20
"""A version may take this much memory beside any model."""

SHARE = 0.25
"""More than that: this share of the rank's slice."""

BYTES_PER_ELEMENT = 2
"""Of a typical parameter; limits need no better."""

log = logging.getLogger(__name__)


class Answer(TypedDict, total=False):
    """What a rank says."""

    error: str
    """Why not; empty if all is well."""
    is_corrupt: bool
    """Whether the error is the version's, not the machine's."""
    digest: str
    """Of its counted elements, or of their change."""
    changed: int
    num_bytes: int
    """Memory that the prepared change holds."""
    is_undoable: bool
    """Whether the old words are kept."""
    is_computed: bool
    """Whether the error is that no map reaches all of the model."""
    identity: str
    """Names the rank in its group."""
    regions: bytes
    """Its map, by coverage.encoded()."""


class Gathered(Protocol):
    """What one prepare() of live words found."""

    @property
    def digest(self) -> Digest: ...
    @property
    def changed(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


_Found = TypeVar("_Found", bound=Gathered)


class Live(Protocol[_Found]):
    """Live words, in host memory or on a device."""

    regions: dict[int, tuple[Region, ...]]

    def count(self, regions: Regions) -> None: ...
    def scan(self) -> Digest: ...
    def prepare(self, blocks: Iterable[StagedBlock]) -> _Found: ...
    def commit(self, prepared: _Found) -> bool: ...
    def undo(self, prepared: _Found) -> bool: ...


class Change(Protocol):
    """A version on its way into the live words."""

    @property
    def digest(self) -> Digest: ...
    @property
    def changed(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def commit(self) -> bool: ...
    def undo(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Undoable(Generic[_Found]):
    """Holds every old and new word."""

    live: Live[_Found]
    prepared: _Found

    @property
    def digest(self) -> Digest:
        """What it adds to the state."""
        return self.prepared.digest

    @property
    def changed(self) -> int:
        """Counted elements that change."""
        return self.prepared.changed

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return self.prepared.num_bytes

    def commit(self) -> bool:
        """Write the new words; harmless when repeated."""
        return self.live.commit(self.prepared)

    def undo(self) -> bool:
        """Write the old words; harmless when repeated, and after half a commit."""
        return self.live.undo(self.prepared)


class Piecewise(Generic[_Found]):
    """Works its words out again, piece by piece, when it is written: too large to be kept."""

    num_bytes = 0

    def __init__(self, live: Live[_Found], path: Path) -> None:
        self._live = live
        self._path = path
        self.digest = digest.NOTHING
        self.changed = 0
        for prepared in self._pieces():
            self.digest = self.digest.plus(prepared.digest)
            self.changed += prepared.changed

    def _pieces(self) -> Iterator[_Found]:
        for piece in pieces(staged.read(self._path)):
            yield self._live.prepare(piece)

    def commit(self) -> bool:
        """Write the new words."""
        return all(self._live.commit(prepared) for prepared in self._pieces())

    def undo(self) -> bool:
        """The old words are gone."""
        return False


def pieces(blocks: list[StagedBlock]) -> Iterator[list[StagedBlock]]:
    """The blocks in order, some at a time; blocks of one tile stay together."""
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


@dataclass(slots=True)
class Rank:
    """One rank's part of every swap; calls come one at a time."""

    open_live: Callable[[Schema, bool], Live[Any]]
    """Maps the checkpoint to this rank's memory, which it may overwrite; the flag says whether
    changed tensors are to be loaded, not written in place.

    Raises:
        CorruptError: the schema does not describe the model.
        ComputedError: no map reaches all of it.
    """
    _live: Live[Any] | None = None
    _identity: str = field(default_factory=lambda: secrets.token_hex(8))
    _preparing: "Future[Change] | None" = None
    _answer: Answer | None = None
    """What came of the last prepare()."""
    _scanning: "Future[Digest] | None" = None
    _changes: list[Change] = field(default_factory=list)
    """Versions that can be taken back, oldest first; the last may not be written yet."""
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="prepare-weights")
    )

    def bake(self, schema: bytes, sha256: str, loads: bool) -> Answer:  # noqa: FBT001 - as above
        """Map a schema to the live words; nothing that was served before is left of them."""
        try:
            self._live = self.open_live(parse_schema(schema, sha256=sha256, where="schema"), loads)
        except CorruptError as error:
            is_computed = isinstance(error, ComputedError)
            return Answer(error=str(error), is_corrupt=True, is_computed=is_computed)
        self._changes, self._preparing, self._answer = [], None, None
        regions = coverage.encoded(self._live.regions)
        return Answer(error="", identity=self._identity, regions=regions)

    def count(self, flags: Mapping[str, bytes]) -> str:
        """Count some regions, as the group agreed.

        Args:
            flags: by identity; see coverage.counting().

        Returns:
            The digest of what this rank counts.
        """
        live = self._baked()
        live.count(coverage.recounted(live.regions, flags[self._identity]))
        return live.scan().hex()

    def prepare(
        self,
        path: str,
        keep_old: bool,  # noqa: FBT001 - called by position
        committed: int = 0,
        kept: int = 0,
    ) -> None:
        """Begin to gather what a staged version changes, beside the forward passes.

        Args:
            path: of the staged file.
            keep_old: whether it can be undone, if its size allows.
            committed: versions that are written and held; what was prepared since is dropped.
            kept: how many of those are held on: memory for the others goes now.
        """
        live = self._baked()
        self._changes = self._changes[:committed][max(0, committed - kept) :]
        self._answer = None
        self._preparing = self._pool.submit(_change, live, Path(path), keep_old=keep_old)

    def prepared(self) -> Answer | None:
        """What came of it, as often as it is asked; None while it is being worked on."""
        if self._answer is None and self._preparing is not None and self._preparing.done():
            self._answer = self._outcome(self._preparing)
        return self._answer

    def _outcome(self, preparing: "Future[Change]") -> Answer:
        try:
            change = preparing.result()
        except CorruptError as error:
            return Answer(error=str(error), is_corrupt=True)
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            return Answer(error=repr(error), is_corrupt=False)
        self._changes.append(change)
        return Answer(
            error="",
            digest=change.digest.hex(),
            changed=change.changed,
            num_bytes=change.num_bytes,
            is_undoable=isinstance(change, Undoable),
        )

    @property
    def _change(self) -> Change | None:
        """What was prepared last, written or not."""
        return self._changes[-1] if self._changes else None

    def commit(self) -> bool:
        """Write what was prepared; False if a word was overwritten that nobody promised."""
        return self._change is not None and self._change.commit()

    def undo(self, number: int | None = None) -> bool:
        """Write the old words of a version again: the last one, or so many from the oldest.

        Returns:
            False if they are not known, or not all that were overwritten were recognised.
        """
        if number is not None:
            self._changes = self._changes[:number]
        return self._change is not None and self._change.undo()

    def scan(self) -> str:
        """The state digest of what is live, from the words themselves."""
        return self._baked().scan().hex()

    def start_scan(self) -> None:
        """Begin to scan beside the forward passes; nothing may be written meanwhile."""
        self._scanning = self._pool.submit(self._baked().scan)

    def scanned(self) -> str | None:
        """What start_scan() found; None while it is at it."""
        if self._scanning is None or not self._scanning.done():
            return None
        return self._scanning.result().hex()

    def _baked(self) -> Live[Any]:
        if self._live is None:
            raise RuntimeError("no map yet: bake() comes first")
        return self._live


def _change(live: Live[Any], path: Path, *, keep_old: bool) -> Change:
    if not keep_old:
        return Piecewise(live, path)
    blocks = staged.read(path)
    needed, limit = _needed(live, blocks), _limit(live)
    if needed > limit:
        log.warning(
            "a version needs up to %d MiB beside the live weights, the limit is %d MiB: it is "
            "written piece by piece, and cannot be taken back",
            needed >> 20,
            limit >> 20,
        )
        return Piecewise(live, path)
    return Undoable(live, live.prepare(blocks))


def _elements(live: Live[Any]) -> int:
    return sum(region.elements for held in live.regions.values() for region in held)


def _limit(live: Live[Any]) -> int:
    """Memory for one version, by the slice that the rank holds."""
    return max(FREE_BYTES, int(_elements(live) * BYTES_PER_ELEMENT * SHARE))


def _needed(live: Live[Any], blocks: Iterable[StagedBlock]) -> int:
    """Memory that a version takes at most: places, old words and new ones."""
    changed: Counter[int] = Counter()
    for block in blocks:
        changed[block.tensor] += block.num_changed
    held = {t: sum(region.elements for region in regions) for t, regions in live.regions.items()}
    most = sum(min(count, held.get(tensor, 0)) for tensor, count in changed.items())
    return most * (4 + 2 * BYTES_PER_ELEMENT)
