"""Checkpoints of learner and controller at the same step.

Each attempt of each epoch writes into its own folder, so that neither a controller that was stalled
and replaced nor a second attempt at the same step touches what a manifest names. The operator
deletes old checkpoints: it knows the pinned ones.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from etude.common.blobs import Store
from etude.common.checkpoints import manifest as checkpoints_manifest
from etude.common.checkpoints.manifest import (
    CONTROLLER,
    MANIFEST,
    CheckpointId,
    CheckpointManifest,
    CheckpointObject,
    CheckpointParent,
    Reason,
    StoredCheckpoint,
    epoch_of,
    is_exported,
)
from etude.common.errors import CorruptError, FencedError, StoreError, WrongStateError
from etude.common.weights import VersionId, is_fenced, lineage
from etude.common.weights.protocol.listing import take_listing
from etude.trainer import metrics
from etude.trainer.compactor.schedule import chain_anchor
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.trainer.controller.checkpoints.state import ControllerState, attempt_folder
from etude.trainer.learner.protocol import Learners
from etude.v1 import journal_pb2

log = logging.getLogger(__name__)


class EpochClosedError(WrongStateError):
    """This controller rolled a version back and opened another epoch before it was stored."""

    reason: ClassVar[str] = "EpochClosed"


class UnstoredCheckpoint(NamedTuple):
    """A checkpoint in the memory of the learner ranks and of the controller."""

    state: ControllerState
    folder: str
    """Of its states, relative to its prefix."""
    exported: list[CheckpointObject]
    reason: Reason
    figures: dict[str, str]
    request: str
    started_s: float
    """Of time.monotonic()."""

    @property
    def place(self) -> CheckpointId:
        return CheckpointId(self.state.branch, self.state.cursor.global_step)


@dataclass(slots=True)
class CheckpointSaver:
    """Writes checkpoints, one after the other.

    begin() runs between two steps, write_objects() and publish() during them.
    """

    store: Store
    book: JournaledLedger
    learners: Learners
    last_step: int = -1
    """Step of the newest checkpoint of this process."""
    last: StoredCheckpoint | None = None
    """The newest checkpoint, which is the parent of the next one."""
    attempts: int = 0
    """Checkpoints that this process began."""

    async def begin(
        self,
        state: ControllerState,
        *,
        reason: Reason,
        with_model: bool,
        figures: dict[str, str],
        request: str = "",
    ) -> UnstoredCheckpoint:
        """Copy the learner's state of this step; no step may be under way.

        Raises:
            FencedError: a newer controller took over.
            StoreError: the store failed.
        """
        started_s = time.monotonic()
        await asyncio.to_thread(self._check_epoch, state.epoch)
        self.attempts += 1
        folder = attempt_folder(state.epoch, self.attempts)
        checkpoint = UnstoredCheckpoint(state, folder, [], reason, figures, request, started_s)
        await self.learners.copy_state(checkpoint.place.prefix + folder)
        if with_model:
            checkpoint.exported.extend(await self.learners.export(checkpoint.place.prefix))
        metrics.CHECKPOINT.labels(stage="copy").observe(time.monotonic() - started_s)
        return checkpoint

    async def publish(
        self, checkpoint: UnstoredCheckpoint, objects: list[CheckpointObject]
    ) -> StoredCheckpoint:
        """Write the manifest of a checkpoint, whose objects were written; steps may run meanwhile.

        Raises:
            EpochClosedError: this controller opened another epoch meanwhile.
            FencedError: a newer controller took over.
            StoreError: the store failed.
        """
        state, place = checkpoint.state, checkpoint.place
        policy = state.cursor.policy or (state.epoch, 0)
        manifest = CheckpointManifest(
            run=state.run,
            step=place.step,
            phase=state.cursor.phase,
            phase_step=state.cursor.step,
            epoch=state.epoch,
            policy_version=policy[1],
            reason=checkpoint.reason,
            objects=objects,
            metrics=checkpoint.figures,
            request=checkpoint.request,
            branch=place.branch,
            parent=self._parent_of(place),
        )
        async with self.book.journal.hold_epoch() as epoch:
            if epoch != state.epoch:
                raise EpochClosedError(f"step {place.step}: epoch {epoch} was opened meanwhile")
            found = await asyncio.to_thread(self._publish_manifest, manifest)
        self.last_step, self.last = place.step, found
        self._journal_checkpoint(found)
        metrics.CHECKPOINT.labels(stage="all").observe(time.monotonic() - checkpoint.started_s)
        return found

    async def write_objects(self, checkpoint: UnstoredCheckpoint) -> list[CheckpointObject]:
        """Write the objects of a checkpoint; they are invisible until the manifest names them.

        Raises:
            StoreError: the store failed.
        """
        prefix, state = checkpoint.place.prefix, checkpoint.state
        saved = await self.learners.save(prefix + checkpoint.folder)
        objects = [each.model_copy(update={"key": checkpoint.folder + each.key}) for each in saved]
        await self.book.journal.wait_durable(state.sequence)
        key = checkpoint.folder + CONTROLLER
        await asyncio.to_thread(self.store.put, prefix + key, state.model_dump_json().encode())
        controller = await asyncio.to_thread(
            checkpoints_manifest.describe_object, self.store, prefix, key
        )
        return [*objects, *checkpoint.exported, controller]

    def _parent_of(self, place: CheckpointId) -> CheckpointParent | None:
        """Parent of a checkpoint; one that is written again keeps its parent."""
        if self.last is None:
            return None
        last = self.last.manifest
        if last.checkpoint_id == place:
            return last.parent
        return CheckpointParent(step=last.step, branch=last.branch, digest=self.last.digest)

    def _check_epoch(self, epoch: int) -> None:
        if is_fenced(self.store, epoch):
            raise FencedError(f"epoch {epoch + 1} was opened: no checkpoint is written")

    def _publish_manifest(self, manifest: CheckpointManifest) -> StoredCheckpoint:
        self._check_epoch(manifest.epoch)
        stored = checkpoints_manifest.write_manifest(self.store, manifest)
        self._check_epoch(manifest.epoch)
        return stored

    async def delete_leftovers(self, stored: StoredCheckpoint) -> None:
        """Delete what earlier attempts at the same step left."""
        await asyncio.to_thread(self._delete_unnamed, stored)

    def _delete_unnamed(self, stored: StoredCheckpoint) -> None:
        manifest = stored.manifest
        named = {MANIFEST, *(item.key for item in manifest.objects)}
        try:
            listed = self.store.list(stored.prefix)
            present = [info.key.removeprefix(stored.prefix) for info in listed]
            # A successor may take over at any moment; its exports do not name its epoch.
            is_replaced = is_fenced(self.store, manifest.epoch)
            stale = [
                stored.prefix + key
                for key in present
                if key not in named
                and epoch_of(key) <= manifest.epoch
                and not (is_replaced and is_exported(key))
            ]
            self.store.delete(stale)
        except StoreError as error:
            log.warning("leftovers of an earlier attempt stay in %s: %s", stored.prefix, error)

    def _journal_checkpoint(self, found: StoredCheckpoint) -> None:
        body = journal_pb2.JournalCheckpoint(
            step=found.manifest.step,
            uri=f"{self.store.url}/{found.prefix}",
            manifest_digest=found.digest,
        )
        self.book.write(journal_pb2.JournalRecord(checkpoint=body))


def chain_keyframe(store: Store, manifest: CheckpointManifest) -> int | None:
    """Number of the complete version from which a chain leads to a checkpoint's; None without one.

    For information only, so it never fails: an unreachable store leaves it unknown.
    """
    version = VersionId(manifest.epoch, manifest.policy_version)
    try:
        line = lineage(store, version)
        anchor = chain_anchor(line, take_listing(store)) if version in line else None
    except (StoreError, CorruptError) as error:
        log.warning("the chain of version %s is unknown: %s", version, error)
        return None
    return None if anchor is None else anchor.number
