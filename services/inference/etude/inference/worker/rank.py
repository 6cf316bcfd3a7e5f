"""One rank's part of a two-phase swap: prepare, activate, undo.

Answers consist of plain values, because they cross a process boundary.
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
from etude.inference.worker import coverage
from etude.inference.worker import pending_change as changes
from etude.inference.worker.coverage import ComputedParameterError
from etude.inference.worker.pending_change import LiveWords, PendingChange, UndoableChange


class RankAnswer(TypedDict, total=False):
    """Answer of a rank."""

    error: str
    """Error text; empty on success."""
    is_corrupt: bool
    """True if the version is at fault, not the host."""
    digest: str
    """Of its counted elements, or of their change."""
    changed: int
    num_bytes: int
    """Memory that the prepared change holds."""
    is_undoable: bool
    """True if the old words are kept."""
    is_computed: bool
    """True if the error is that the map does not cover the model."""
    identity: str
    """Names the rank in its group."""
    regions: bytes
    """Its map, by coverage.encode_regions()."""


@dataclass(slots=True)
class Rank:
    """One rank's part of every swap; calls come one at a time."""

    open_live: Callable[[Schema, bool], LiveWords[Any]]
    """Maps the checkpoint to this rank's memory, which it may overwrite; the flag says whether
    changed tensors are to be loaded, not written in place.

    Raises:
        CorruptError: the schema does not describe the model.
        ComputedParameterError: no map reaches all of it.
    """
    _live: LiveWords[Any] | None = None
    _identity: str = field(default_factory=lambda: secrets.token_hex(8))
    _preparing: "Future[PendingChange] | None" = None
    _answer: RankAnswer | None = None
    """Result of the last prepare()."""
    _scanning: "Future[Digest] | None" = None
    _changes: list[PendingChange] = field(default_factory=list)
    """Changes that can be undone, oldest first; the last may not be written yet."""
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="prepare-weights")
    )

    def build_map(self, schema: bytes, sha256: str, uses_loader: bool) -> RankAnswer:  # noqa: FBT001 - as above
        """Map a schema to the live words, which are overwritten."""
        try:
            self._live = self.open_live(
                parse_schema(schema, sha256=sha256, where="schema"), uses_loader
            )
        except CorruptError as error:
            is_computed = isinstance(error, ComputedParameterError)
            return RankAnswer(error=str(error), is_corrupt=True, is_computed=is_computed)
        self._changes, self._preparing, self._answer = [], None, None
        regions = coverage.encode_regions(self._live.regions)
        return RankAnswer(error="", identity=self._identity, regions=regions)

    def set_counted(self, flags: Mapping[str, bytes]) -> str:
        """Count some regions, as the group agreed.

        Args:
            flags: by identity; see coverage.assign_counted().

        Returns:
            The digest of the elements that this rank counts.
        """
        live = self._mapped_live()
        live.count(coverage.mark_counted(live.regions, flags[self._identity]))
        return live.scan().hex()

    def prepare(
        self,
        path: str,
        keep_old: bool,  # noqa: FBT001 - called by position
        committed: int = 0,
        kept: int = 0,
    ) -> None:
        """Start gathering the changes of a staged version, concurrently with forward passes.

        Args:
            path: of the staged file.
            keep_old: whether it can be undone, if its size allows.
            committed: number of changes that are written and held; later ones are dropped.
            kept: number of those to keep; the others are freed now.
        """
        live = self._mapped_live()
        self._changes = self._changes[:committed][max(0, committed - kept) :]
        self._answer = None
        self._preparing = self._pool.submit(
            changes.prepare_change, live, Path(path), keep_old=keep_old
        )

    def poll_prepared(self) -> RankAnswer | None:
        """Result of prepare(), at every call; None while it runs."""
        if self._answer is None and self._preparing is not None and self._preparing.done():
            self._answer = self._outcome(self._preparing)
        return self._answer

    def _outcome(self, preparing: "Future[PendingChange]") -> RankAnswer:
        try:
            change = preparing.result()
        except CorruptError as error:
            return RankAnswer(error=str(error), is_corrupt=True)
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            return RankAnswer(error=repr(error), is_corrupt=False)
        self._changes.append(change)
        return RankAnswer(
            error="",
            digest=change.digest.hex(),
            changed=change.changed,
            num_bytes=change.num_bytes,
            is_undoable=isinstance(change, UndoableChange),
        )

    @property
    def _change(self) -> PendingChange | None:
        """The change that was prepared last, written or not."""
        return self._changes[-1] if self._changes else None

    def activate(self) -> bool:
        """Write the prepared change; False if an overwritten word was unexpected."""
        return self._change is not None and self._change.write()

    def undo(self, number: int | None = None) -> bool:
        """Write the old words of a version again: of the last one, or of the `number`-th.

        Returns:
            False if they are not known, or not all that were overwritten were recognised.
        """
        if number is not None:
            self._changes = self._changes[:number]
        return self._change is not None and self._change.undo()

    def scan(self) -> str:
        """State digest of the live words, by scanning them."""
        return self._mapped_live().scan().hex()

    def start_scan(self) -> None:
        """Start a scan, concurrently with forward passes; nothing may be written meanwhile."""
        self._scanning = self._pool.submit(self._mapped_live().scan)

    def poll_scan(self) -> str | None:
        """Digest of start_scan(); None while it runs."""
        if self._scanning is None or not self._scanning.done():
            return None
        return self._scanning.result().hex()

    def _mapped_live(self) -> LiveWords[Any]:
        if self._live is None:
            raise RuntimeError("the weight map is not built: call build_map() first")
        return self._live
