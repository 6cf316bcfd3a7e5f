"""Checkpoints of learner and controller at the same step.

Each epoch writes into its own folder, so that a controller that was stalled and replaced cannot
touch its successor's objects of the same step. The operator deletes old checkpoints: it knows the
pinned ones.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from etude.common.blobs import Store
from etude.common.checkpoints import manifest as checkpoints_manifest
from etude.common.checkpoints.manifest import (
    MANIFEST,
    CheckpointId,
    CheckpointManifest,
    CheckpointObject,
    CheckpointParent,
    Reason,
    StoredCheckpoint,
)
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.common.weights import VersionId, is_fenced, lineage
from etude.common.weights.protocol.listing import take_listing
from etude.trainer import metrics
from etude.trainer.compactor.schedule import chain_anchor
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.trainer.controller.checkpoints.state import CONTROLLER, ControllerState, epoch_folder
from etude.trainer.learner.protocol import Learners
from etude.v1 import journal_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CheckpointSaver:
    """Writes checkpoints; the learner must be idle meanwhile, rollouts may run."""

    store: Store
    book: JournaledLedger
    learners: Learners
    last_step: int = -1
    """Step of the newest checkpoint of this process."""
    last: StoredCheckpoint | None = None
    """The newest checkpoint, which is the parent of the next one."""

    async def save(
        self,
        state: ControllerState,
        *,
        reason: Reason,
        with_model: bool,
        figures: dict[str, str],
        request: str = "",
    ) -> StoredCheckpoint:
        """Write a checkpoint and publish its manifest.

        Raises:
            FencedError: a newer controller took over.
            StoreError: the store failed.
        """
        started = time.monotonic()
        step = state.cursor.global_step
        place = CheckpointId(state.branch, step)
        objects = await self._write_objects(state, place.prefix, with_model=with_model)
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
            parent=self._parent_of(place),
        )
        found = await asyncio.to_thread(self._publish_manifest, manifest)
        self.last_step, self.last = step, found
        self._journal_checkpoint(found)
        metrics.CHECKPOINT.labels(stage="all").observe(time.monotonic() - started)
        return found

    async def _write_objects(
        self, state: ControllerState, prefix: str, *, with_model: bool
    ) -> list[CheckpointObject]:
        """Write the objects of a checkpoint; they are invisible until the manifest names them."""
        folder = epoch_folder(state.epoch)
        await asyncio.to_thread(self._check_epoch, state.epoch)
        saved = await self.learners.save(prefix + folder)
        objects = [item.model_copy(update={"key": folder + item.key}) for item in saved]
        if with_model:
            await asyncio.to_thread(self._check_epoch, state.epoch)
            objects += await self.learners.export(prefix)
        await self.book.journal.wait_durable(state.sequence)
        key = folder + CONTROLLER
        await asyncio.to_thread(self.store.put, prefix + key, state.model_dump_json().encode())
        objects.append(
            await asyncio.to_thread(checkpoints_manifest.describe_object, self.store, prefix, key)
        )
        return objects

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
        named = {MANIFEST, *(item.key for item in manifest.objects)}
        present = [info.key.removeprefix(stored.prefix) for info in self.store.list(stored.prefix)]
        stale = [
            stored.prefix + key
            for key in present
            if key not in named and not _is_of_later_epoch(key, manifest.epoch)
        ]
        try:
            self.store.delete(stale)
        except StoreError as error:
            log.warning("leftovers of an earlier attempt stay in %s: %s", stored.prefix, error)
        return stored

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


def _is_of_later_epoch(key: str, epoch: int) -> bool:
    """True if a successor wrote the object; it may take over at any moment."""
    folder = key.partition("/")[0]
    return folder.isdecimal() and int(folder) > epoch
