"""Replay of a history's steps by a learner that has a copy of the checkpoint."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.common.blobs import Store
from etude.common.checkpoints.manifest import CONTROLLER, StoredCheckpoint
from etude.common.run_folder.record import RunRecord
from etude.common.stores import download_objects
from etude.trainer.contents.objects import copy_tokens
from etude.trainer.controller.admission.groups import build_policy_batch
from etude.trainer.learner.batches import StepResult
from etude.trainer.learner.protocol import Learners
from etude.trainer.learner.routes.replay import copy_routes, replay_mode
from etude.trainer.replay.differences import StepVerdict, judge_step
from etude.trainer.replay.history import RecordedStep, StepHistory
from etude.v1 import rollout_content_pb2


def copy_checkpoint(store: Store, found: StoredCheckpoint, folder: Path) -> str:
    """Copy the learner's half of a checkpoint into a folder; returns its prefix there.

    A replay works on the copy: nothing is ever written to the store of the run.

    Raises:
        CorruptError: a key would leave the folder.
        StoreError: the store does not answer.
    """
    state_folder = found.prefix + found.manifest.state_folder
    objects = [each for each in store.list(state_folder) if not each.key.endswith(CONTROLLER)]
    download_objects(store, objects, folder)
    return state_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplayer:
    """Trains the steps of a history again, and compares each with its record."""

    history: StepHistory
    learners: Learners
    record: RunRecord
    """Readable rollouts of the run."""
    prefix: str
    """Of the copied state of the learner; empty for the start weights."""
    source: Store
    """Of the run; nothing is written to it."""
    states: Store
    """Of the learner: the rollouts of each batch are copied there."""

    async def replay(self) -> AsyncIterator[StepVerdict]:
        """Replay step by step, from the checkpoint to the requested step.

        Raises:
            EtudeError: the learner cannot be restored, or refuses a batch.
        """
        if self.prefix:
            await self.learners.restore(self.prefix)
        cursor, phase = self.history.cursor, ""
        for step in self.history.steps:
            if step.phase.name != phase:
                is_under_way = step.phase.name == cursor.phase and step.number == cursor.step + 1
                data = cursor.data if is_under_way else ""
                await self.learners.start_phase(step.phase, step.number - 1, data)
                phase = step.phase.name
            result = await self._train(step)
            yield judge_step(step, result, shown_ids=self._shown_ids(step))

    async def _train(self, step: RecordedStep) -> StepResult:
        if step.phase.algorithm is None:
            return await self.learners.supervised_step(step.number - 1)
        versions = self.history.ledger.versions
        current = {
            each for each, published in versions.items() if published == step.global_step - 1
        }
        batch = build_policy_batch(step.groups, current=current)
        parse = rollout_content_pb2.RolloutContent.FromString
        contents = [parse(each.content) for each in batch.stored]
        links = copy_tokens(self.source, self.states, contents)
        keys = {link.routes.key for link in links if link.HasField("routes")}
        if replay_mode(step.phase) == "Recorded":
            held = [each.stored_routes for each in batch.sequences]
            keys.update(each.key for each in held if each is not None)
            copy_routes(self.source, self.states, keys)
        return await self.learners.policy_step(batch)

    def _shown_ids(self, step: RecordedStep) -> Sequence[str] | None:
        """Ids of the step's rollouts in the readable record; None if it has none."""
        if step.phase.algorithm is None:
            return None
        rows = self.record.rollouts(step.global_step, "train")
        return [str(row["rollout_id"]) for row in rows] or None
