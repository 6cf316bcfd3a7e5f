"""Checkpoints of learner and controller at the same step.

Each epoch writes into a folder of its own, so that a controller that was stalled and replaced
cannot touch what its successor saved at the same step. Which checkpoints stay is the operator's
business: it knows the pinned ones.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from etude.common import checkpoints
from etude.common.blobs import Store
from etude.common.checkpoints import (
    MANIFEST,
    CheckpointManifest,
    CheckpointObject,
    Parent,
    Place,
    Reason,
    StoredCheckpoint,
)
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.common.weights import VersionId, is_fenced, lineage
from etude.common.weights.protocol.listing import take_listing
from etude.trainer import metrics
from etude.trainer.compactor.schedule import anchor_of
from etude.trainer.controller.checkpoints.recovery import Book
from etude.trainer.controller.checkpoints.state import CONTROLLER, ControllerState, epoch_folder
from etude.trainer.rollouts.protocol import Learners
from etude.v1 import journal_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Saver:
    """Writes checkpoints; the learner must be idle meanwhile, rollouts may go on."""

    store: Store
    book: Book
    learners: Learners
    last_step: int = -1
    """Step of the newest checkpoint of this process."""
    last: StoredCheckpoint | None = None
    """What the next one goes back to."""

    async def save(
        self,
        state: ControllerState,
        *,
        reason: Reason,
        with_model: bool,
        figures: dict[str, str],
        request: str = "",
    ) -> StoredCheckpoint:
        """Write the state and make it visible.

        Args:
            state: the controller's half.
            reason: why it is saved.
            with_model: whether a model folder is exported too.
            figures: of the run at this step.
            request: UID of the Checkpoint object that asked for it.

        Raises:
            FencedError: a newer controller took over.
            StoreError: the store failed.
        """
        started = time.monotonic()
        step = state.cursor.global_step
        place = Place(state.branch, step)
        objects = await self._write(state, place.prefix, with_model=with_model)
        policy = state.cursor.policy or (state.epoch, 0)
        manifest = CheckpointManifest(
            run=state.run,
            step=step,
            phase=state.cursor.phase,
            phase_step=state.cursor.step,
            epoch=state.epoch,
            policy_version=policy[1],
            reason=reason,
            objects=objects,
            metrics=figures,
            request=request,
            branch=place.branch,
            parent=self._parent(place),
        )
        found = await asyncio.to_thread(self._commit, manifest)
        self.last_step, self.last = step, found
        self._log(found)
        metrics.CHECKPOINT.labels(stage="all").observe(time.monotonic() - started)
        return found

    async def _write(
        self, state: ControllerState, prefix: str, *, with_model: bool
    ) -> list[CheckpointObject]:
        """Everything that a manifest will name; nobody sees it before that."""
        folder = epoch_folder(state.epoch)
        await asyncio.to_thread(self._check_epoch, state.epoch)
        saved = await self.learners.save(prefix + folder)
        objects = [item.model_copy(update={"key": folder + item.key}) for item in saved]
        if with_model:
            await asyncio.to_thread(self._check_epoch, state.epoch)
            objects += await self.learners.export(prefix)
        await self.book.journal.durable(state.sequence)
        key = folder + CONTROLLER
        await asyncio.to_thread(self.store.put, prefix + key, state.model_dump_json().encode())
        objects.append(await asyncio.to_thread(checkpoints.described, self.store, prefix, key))
        return objects

    def _parent(self, place: Place) -> Parent | None:
        """What a checkpoint goes back to; one that is written again to what it did before."""
        if self.last is None:
            return None
        last = self.last.manifest
        if last.place == place:
            return last.parent
        return Parent(step=last.step, branch=last.branch, digest=self.last.digest)

    def _check_epoch(self, epoch: int) -> None:
        if is_fenced(self.store, epoch):
            raise FencedError(f"epoch {epoch + 1} was opened: no checkpoint is written")

    def _commit(self, manifest: CheckpointManifest) -> StoredCheckpoint:
        self._check_epoch(manifest.epoch)
        found = checkpoints.commit(self.store, manifest)
        self._check_epoch(manifest.epoch)
        kept = {MANIFEST, *(item.key for item in manifest.objects)}
        present = [info.key.removeprefix(found.prefix) for info in self.store.list(found.prefix)]
        rests = [
            found.prefix + key
            for key in present
            if key not in kept and not _is_of_later(key, manifest.epoch)
        ]
        try:
            self.store.delete(rests)
        except StoreError as error:
            log.warning("rests of an earlier try stay in %s: %s", found.prefix, error)
        return found

    def _log(self, found: StoredCheckpoint) -> None:
        body = journal_pb2.JournalCheckpoint(
            step=found.manifest.step,
            uri=f"{self.store.url}/{found.prefix}",
            manifest_digest=found.digest,
        )
        self.book.write(journal_pb2.JournalRecord(checkpoint=body))


def keyframe_of(store: Store, manifest: CheckpointManifest) -> int | None:
    """Number of the whole version from which the chain leads to a checkpoint's; None without one.

    Informs people, and therefore never fails: a store that is away leaves it unknown.
    """
    version = VersionId(manifest.epoch, manifest.policy_version)
    try:
        line = lineage(store, version)
        anchor = anchor_of(line, take_listing(store)) if version in line else None
    except (StoreError, CorruptError) as error:
        log.warning("the chain of version %s is unknown: %s", version, error)
        return None
    return None if anchor is None else anchor.number


def _is_of_later(key: str, epoch: int) -> bool:
    """Whether a successor wrote it, who may take over at any moment."""
    folder = key.partition("/")[0]
    return folder.isdecimal() and int(folder) > epoch
