"""Compactor of published weights: keyframes, skips and garbage collection of old versions.

It follows the chain of versions in a process of its own, and nothing waits for it. Killed at any
point it leaves a consistent store: a keyframe or a skip is visible once its record is there, and
objects without a record are swept by a later collector.
"""

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlparse

from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import MissingError, RangeReader, Store
from etude.common.checkpoints import manifest
from etude.common.errors import CorruptError, EtudeError, FencedError
from etude.common.release.channels import retained_versions
from etude.common.stores import open_run_store
from etude.common.weights import GarbageCollector, Retention, is_fenced
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.protocol.chain_view import ChainView, ChainViewer
from etude.common.weights.protocol.retention import ORPHAN_S
from etude.common.weights.protocol.versions import VersionId, skip_key
from etude.common.weights.replicas.mirror import Change, DamagedEdgeError, Mirror
from etude.trainer.compactor.folding import FoldWindow, FoldWindows
from etude.trainer.compactor.keyframes import write_keyframe, write_skip
from etude.trainer.compactor.parts import PART_BYTES
from etude.trainer.compactor.report import CompactorFailure, CompactorReport, FoldedWrite
from etude.trainer.compactor.schedule import (
    EMPTY,
    OVERDUE,
    ChainState,
    KeyframeCadence,
    is_keyframe_due,
    measure_chain,
    versions_to_visit,
)
from etude.trainer.export.codec_choice import CODECS

_STAGED = re.compile(r"#[0-9]+$")
"""How the names of files end that the client writes before it gives them their key: no listing
shows them, and the client refuses a key with such a name."""


def move_around_damage(
    mirror: Mirror,
    version: VersionId,
    damage: CorruptError | MissingError,
    *,
    on_change: Change,
) -> bool:
    """Move a copy to a version by steps that are not damaged.

    Args:
        mirror: becomes the version, or what the last sound step led to.
        version: an accepted one.
        damage: what the copy met on the cheapest way.
        on_change: as in Mirror.move_to().

    Returns:
        Whether there is a way; False if whatever leads there is damaged or gone.

    Raises:
        FencedError: the version is not on the accepted chain.
        StoreError: the store failed.
    """
    avoid = _keys(damage)
    while True:
        try:
            # Looks at the store anew: an object may have gone since the caller did.
            mirror.move_to(version, on_change, avoid=avoid)
        except (CorruptError, MissingError) as error:
            keys = _keys(error)
            if keys <= avoid:
                return False
            avoid |= keys
        else:
            return True


def _keys(damage: CorruptError | MissingError) -> set[str]:
    """The objects of the step that is damaged; none where no step is."""
    if isinstance(damage, DamagedEdgeError):
        return {item.key for item in damage.edge.objects}
    return set()


log = logging.getLogger(__name__)

NICENESS = 10
"""Of the compactor's process: learners and engines on the same machine come first."""

COLLECT_EVERY_S = 60.0
"""Between two rounds of the collector: readers renew their leases twice as often."""

RETRY_S = 30.0
"""After a keyframe that failed: each attempt reads and packs the whole model."""

MOST_BEHIND = 256
"""Versions that are visited one by one for the skips between them; older ones are passed over."""

_UNKNOWN_BYTES = 1 << 62
"""Size of a model that was not read yet: larger than any chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactorConfig:
    """Configuration of the compactor of one epoch."""

    run: str
    """UID of the run."""
    epoch: int
    storage: Storage
    """Where versions are."""
    folder: Path
    """Private, on local disk: one model, and up to one for each stride of skips."""
    weights: Weights
    collect_every_s: float = COLLECT_EVERY_S
    retry_s: float = RETRY_S
    part_bytes: int = PART_BYTES


class Compactor:
    """Compacts the open epoch's chain of versions; one per run."""

    def __init__(
        self,
        config: CompactorConfig,
        *,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        store = open_run_store(config.storage.uri, config.storage) if store is None else store
        weights = config.weights
        advanced = weights.advanced
        self._store = store
        self._config = config
        self._clock = clock
        self._cadence = KeyframeCadence(weights.versions_per_keyframe, float(advanced.chain_ratio))
        self._codec = CODECS.get(advanced.codec, Codec.L1)
        self._mirror: Mirror | None = None
        self._ranges = RangeReader(store)
        self._windows = FoldWindows(advanced.skips, config.folder / "skips")
        self._collector = GarbageCollector(
            store=store,
            epoch=config.epoch,
            resumable=self._resume_versions,
            served=lambda: retained_versions(store, config.run),
            retention=Retention(
                versions=advanced.retain_versions, keyframes=advanced.retain_keyframes
            ),
        )
        self._viewer = ChainViewer(store)
        self._seen: ChainView | None = None
        """View of this round; None again after a write or a failure."""
        self._chain: list[VersionId] = []
        self._collect_at = self._retry_at = clock()
        self._written: list[FoldedWrite] = []
        self._failures: list[CompactorFailure] = []
        self._cut_off_at: VersionId | None = None
        self._lock = threading.Lock()

    def run_round(self, epoch: int | None = None) -> CompactorReport:
        """Catch up with the chain and do what is due; a later round retries failures.

        Args:
            epoch: a newer one that the same controller opened; unset keeps the last one.

        Raises:
            FencedError: a newer epoch was opened; do not call again.
        """
        with self._lock:
            if epoch is not None:
                self._config = replace(self._config, epoch=epoch)
                self._collector.epoch = epoch
            self._written, self._failures, self._seen = [], [], None
            self._cut_off_at = None
            collected: list[str] = []
            self._attempt("epoch", self._check_epoch)
            if not self._failures:
                self._attempt("follow", self._follow)
                self._attempt("keyframe", self._keyframe_if_due)
                self._attempt("collect", lambda: collected.extend(self._collect_if_due()))
            states = [EMPTY]
            self._attempt("survey", lambda: states.append(self._survey()))
            state = states[-1]
            return CompactorReport(
                state,
                is_keyframe_due(state, self._cadence, self._model_bytes, times=OVERDUE),
                self._cut_off_at,
                tuple(self._written),
                len(collected),
                tuple(self._failures),
            )

    def _attempt(self, stage: str, work: Callable[[], object]) -> None:
        try:
            work()
        except FencedError as error:
            self._check_epoch()
            self._fail(stage, error)
        except (EtudeError, OSError) as error:
            self._fail(stage, error)

    def _fail(self, stage: str, error: Exception) -> None:
        log.warning("%s failed and is retried later: %s", stage, error)
        self._failures.append(CompactorFailure(stage, str(error)))
        self._forget_view()

    def _view(self) -> ChainView:
        if self._seen is None:
            self._seen = self._viewer.refresh()
        return self._seen

    def _forget_view(self) -> None:
        self._viewer.reset()
        self._seen = None

    def _check_epoch(self) -> None:
        if is_fenced(self._store, self._config.epoch):
            raise FencedError(f"epoch {self._config.epoch + 1} was opened: the compactor stops")

    def _follow(self) -> None:
        if self._config.weights.encoding == "Full":
            return  # every version is complete: there is no chain to shorten
        mirror = self._open_copy()
        view = self._view()
        self._chain = view.usable
        live = None if mirror.ref is None else mirror.ref.version
        try:
            for version in versions_to_visit(self._chain, live, most=MOST_BEHIND):
                mirror.move_to(version, self._windows.touch, view=view)
                self._handle_arrival(mirror)
        except (CorruptError, MissingError) as problem:
            # The fault may lie in the store's object, or in a word on this disk.
            if mirror.ref is not None and mirror.scan().hex() != mirror.ref.state:
                self._drop_copy()
                raise
            newest, touch = self._chain[-1], self._windows.touch
            if not move_around_damage(mirror, newest, problem, on_change=touch):
                self._cut_off_at = newest
                raise
            log.warning("took a detour around: %s", problem)
            self._handle_arrival(mirror)

    def _open_copy(self) -> Mirror:
        # Reading what an earlier process left takes a while: not in the constructor.
        if self._mirror is None:
            folder = self._config.folder / "copy"
            self._mirror = Mirror(self._store, folder, self._config.run, self._ranges)
        return self._mirror

    def _drop_copy(self) -> None:
        """Delete the local copy; the next round starts from the store."""
        self._windows.close_all()
        self._mirror = None
        shutil.rmtree(self._config.folder / "copy", ignore_errors=True)

    def _handle_arrival(self, mirror: Mirror) -> None:
        """Handle a new version of the copy: write skips that end here, open those that begin."""
        if mirror.ref is None or mirror.schema is None:
            return
        for window in list(self._windows.closing_windows(mirror.ref)):
            self._attempt("skip", partial(self._write_skip, mirror, window))
        self._windows.open_windows(mirror.ref, mirror.schema)

    def _write_skip(self, mirror: Mirror, window: FoldWindow) -> None:
        base = window.base.version
        if mirror.ref is None or base not in self._chain:
            return
        if self._store.head(skip_key(base, mirror.ref.version)) is not None:
            return
        config = self._config
        written = write_skip(
            self._store,
            run=config.run,
            mirror=mirror,
            window=window,
            codec=self._codec,
            part_bytes=config.part_bytes,
        )
        if written is not None:
            self._record_written(written)

    def _keyframe_if_due(self) -> None:
        mirror = self._mirror
        if mirror is None or mirror.ref is None or mirror.ref.version not in self._chain:
            return
        upto = self._chain[: self._chain.index(mirror.ref.version) + 1]
        state = measure_chain(upto, self._view().listing)
        if self._clock() < self._retry_at or not is_keyframe_due(
            state, self._cadence, self._model_bytes
        ):
            return
        self._retry_at = self._clock() + self._config.retry_s
        try:
            written = write_keyframe(
                self._store, self._config.run, mirror, part_bytes=self._config.part_bytes
            )
        except CorruptError:
            self._drop_copy()
            raise
        self._retry_at = self._clock()
        self._record_written(written)

    def _record_written(self, written: FoldedWrite) -> None:
        self._written.append(written)
        self._forget_view()

    def _collect_if_due(self) -> list[str]:
        if self._clock() < self._collect_at:
            return []
        self._forget_view()
        deleted = self._collector.collect()
        self._collect_at = self._clock() + self._config.collect_every_s
        self._attempt(
            "unfinished", lambda: delete_unfinished_uploads(self._store.url, older_than_s=ORPHAN_S)
        )
        return deleted

    def _resume_versions(self) -> set[VersionId]:
        """Versions that a resume starts from: those that checkpoints name."""
        return {
            VersionId(found.manifest.epoch, found.manifest.policy_version)
            for found in manifest.stored_checkpoints(self._store, run=self._config.run)
        }

    def _survey(self) -> ChainState:
        view = self._view()
        return measure_chain(view.usable, view.listing)

    @property
    def _model_bytes(self) -> int:
        schema = None if self._mirror is None else self._mirror.schema
        return _UNKNOWN_BYTES if schema is None else schema.num_bytes


class CompactorProcess(Compactor):
    """Compactor as a Ray actor, at low CPU priority."""

    def __init__(self, config: CompactorConfig) -> None:
        os.nice(NICENESS)
        super().__init__(config)


def delete_unfinished_uploads(url: str, *, older_than_s: float) -> list[Path]:
    """Delete the files of interrupted writes in a folder store; in buckets delete nothing.

    Args:
        url: of the store.
        older_than_s: since the last write to it, counted by the folder's own clock up to its
            newest file.

    Returns:
        The files that are gone.

    Raises:
        OSError: a file could not be deleted.
    """
    parts = urlparse(url)
    if parts.scheme != "file":
        return []
    written = dict(_files(unquote(parts.path)))
    newest_s = max(written.values(), default=0.0)
    found = [
        path
        for path, modified_s in written.items()
        if _STAGED.search(path.name) and modified_s + older_than_s <= newest_s
    ]
    for path in found:
        path.unlink(missing_ok=True)
    return found


def _files(folder: str) -> Iterator[tuple[Path, float]]:
    """Every file with the time of its last write."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):  # finished or deleted meanwhile
                yield path, path.lstat().st_mtime
