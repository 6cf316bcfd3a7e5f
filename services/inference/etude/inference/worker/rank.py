"""The weights of one rank through the two phases of a swap: prepared, written, taken back.

Every answer is made of plain values, which cross a process as they are.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict

from etude.common.errors import CorruptError
from etude.common.weights import digest, staged
from etude.common.weights.digest import Digest
from etude.common.weights.live import LiveWeights
from etude.common.weights.prepared import Prepared
from etude.common.weights.schema import Schema, parse_schema
from etude.common.weights.staged import StagedBlock

PIECE_ELEMENTS = 1 << 23
"""Elements in flight while a version is written without the old words being kept."""


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
class Undoable:
    """Holds every old and new word."""

    live: LiveWeights
    prepared: Prepared

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


class Piecewise:
    """Works its words out again, piece by piece, when it is written: too large to be kept."""

    num_bytes = 0

    def __init__(self, live: LiveWeights, path: Path) -> None:
        self._live = live
        self._path = path
        self.digest = digest.NOTHING
        self.changed = 0
        for prepared in self._pieces():
            self.digest = self.digest.plus(prepared.digest)
            self.changed += prepared.changed

    def _pieces(self) -> Iterator[Prepared]:
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

    open_live: Callable[[Schema, bool], LiveWeights]
    """Maps the checkpoint to this rank's memory, which it may overwrite; the flag says whether it
    may load tensors where no map reaches.

    Raises:
        CorruptError: the schema does not describe the model.
    """
    _live: LiveWeights | None = None
    _preparing: "Future[Change] | None" = None
    _scanning: "Future[Digest] | None" = None
    _change: Change | None = None
    """What was prepared last, written or not; with the old words, if they are kept."""
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="prepare-weights")
    )

    def bake(self, schema: bytes, sha256: str, may_load: bool) -> Answer:  # noqa: FBT001 - as above
        """Map a schema to the live words; nothing that was served before is left of them."""
        try:
            self._live = self.open_live(
                parse_schema(schema, sha256=sha256, where="schema"), may_load
            )
        except CorruptError as error:
            return Answer(error=str(error), is_corrupt=True)
        self._change = self._preparing = None
        return Answer(error="", digest=self._live.scan().hex())

    def prepare(self, path: str, keep_old: bool) -> None:  # noqa: FBT001 - called by position
        """Begin to gather what a staged version changes, beside the forward passes."""
        live = self._baked()
        # The undo record of the version before goes now: two of them would double the memory.
        self._change = None
        self._preparing = self._pool.submit(_change, live, Path(path), keep_old=keep_old)

    def prepared(self) -> Answer | None:
        """What came of it; None while it is being worked on."""
        if self._preparing is None or not self._preparing.done():
            return None
        try:
            change = self._preparing.result()
        except CorruptError as error:
            return Answer(error=str(error), is_corrupt=True)
        except (MemoryError, OSError, ValueError) as error:
            return Answer(error=repr(error), is_corrupt=False)
        self._change = change
        return Answer(
            error="",
            digest=change.digest.hex(),
            changed=change.changed,
            num_bytes=change.num_bytes,
        )

    def commit(self) -> bool:
        """Write what was prepared; False if a word was overwritten that nobody promised."""
        return self._change is not None and self._change.commit()

    def undo(self) -> bool:
        """Write the old words again; False if they are not known or not all were recognised."""
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

    def _baked(self) -> LiveWeights:
        if self._live is None:
            raise RuntimeError("no map yet: bake() comes first")
        return self._live


def _change(live: LiveWeights, path: Path, *, keep_old: bool) -> Change:
    if keep_old:
        return Undoable(live, live.prepare(staged.read(path)))
    return Piecewise(live, path)
