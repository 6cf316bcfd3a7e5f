"""The weights of one rank through the two phases of a swap: prepared, written, taken back.

Every answer is made of plain values, which cross a process as they are.
"""

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from etude.common.errors import CorruptError
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema, parse_schema
from etude.inference import coverage
from etude.inference.coverage import ComputedError
from etude.inference.worker import change as changes
from etude.inference.worker.change import Change, Live, Undoable


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
        self._preparing = self._pool.submit(changes.prepared, live, Path(path), keep_old=keep_old)

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
