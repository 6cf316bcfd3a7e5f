"""Scoring of recorded groups by the rubric of a reward service, and their rows."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etude.common.api.run.rollout_policy import TrainingRolloutPolicy
from etude.common.api.storage import Storage
from etude.common.blobs import MissingError, Store
from etude.common.blobs.store import ShortReadError
from etude.common.errors import CorruptError
from etude.common.harbor.task_file import TaskFile, parse_task_file
from etude.common.stores import open_source
from etude.trainer.contents.objects import restore_calls
from etude.trainer.rescoring.rebuilding import ChangeRebuilder, LeftOut, LostRebuild
from etude.trainer.rescoring.recorded_groups import TrainedGroup
from etude.trainer.rescoring.results import MISSING, RescoreResults, Row
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.rollouts.scoring import Scorer
from etude.trainer.routing.table import Purpose
from etude.v1 import journal_pb2, rollout_pb2


class _Task(NamedTuple):
    """A group's task, from its folder."""

    uri: str
    settings: TaskFile


@dataclass(slots=True, kw_only=True)
class GroupRescorer:
    """Scores groups again, several at a time, and records each as it ends."""

    source: Store
    """Of the run; nothing is written to it."""
    rebuilder: ChangeRebuilder
    scorer: Scorer
    results: RescoreResults
    storage: Storage
    parallel: int
    """Groups at a time."""

    async def rescore(
        self, groups: Sequence[TrainedGroup], known: Mapping[str, Row]
    ) -> AsyncIterator[list[Row]]:
        """Score groups again, and yield the rows of each as it is done; known ones come first.

        Args:
            groups: to score.
            known: rows of an earlier process, by rollout; groups with a lost one are repeated.
        """
        left = []
        for group in groups:
            rows = [known.get(each.rollout.rollout_id) for each in group.records]
            done = [row for row in rows if row is not None and "fault" not in row]
            if len(done) < len(rows):
                left.append(group)
            elif done:
                yield done
        slots = asyncio.Semaphore(self.parallel)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._rescore(each, slots), name=each.group.group_id)
                for each in left
            ]
            for each in asyncio.as_completed(running):
                yield await each

    async def _rescore(self, group: TrainedGroup, slots: asyncio.Semaphore) -> list[Row]:
        async with slots:
            records, missing = await asyncio.to_thread(self._read_records, group)
            try:
                task = await asyncio.to_thread(self._read_task, group)
            except (MissingError, CorruptError) as error:
                rows = [_row(group, each, left_out=f"its task: {error}") for each in records]
            else:
                rows = await self._score(group, records, task) if records else []
            rows += missing
            await asyncio.to_thread(self.results.add, rows)
            return rows

    def _read_records(
        self, group: TrainedGroup
    ) -> tuple[list[journal_pb2.JournalRollout], list[Row]]:
        """Read the calls of a group's rollouts; rows of those whose calls are gone or damaged."""
        found: list[journal_pb2.JournalRollout] = []
        missing: list[Row] = []
        for each in group.records:
            try:
                found.append(restore_calls(self.source, each))
            except (MissingError, CorruptError, ShortReadError) as error:
                missing.append(_row(group, each, left_out=f"{MISSING}: {error}"))
        return found, missing

    def _read_task(self, group: TrainedGroup) -> _Task:
        """Read the settings of a group's task.

        Raises:
            MissingError: the task is gone.
            CorruptError: its settings cannot be read.
        """
        store = open_source(group.tasks.uri, self.storage)
        data = store.get(f"{group.folder}/task.toml")
        try:
            settings = parse_task_file(data.decode())
        except ValueError as cause:
            raise CorruptError(f"task.toml: {cause}") from cause
        return _Task(f"{store.url}/{group.folder}", settings)

    async def _score(
        self, group: TrainedGroup, records: Sequence[journal_pb2.JournalRollout], task: _Task
    ) -> list[Row]:
        """Make the changes of siblings again and score them together, as functions compare them."""
        orders = [_order(group, each.rollout, task.uri) for each in records]
        rebuilt = await asyncio.gather(
            *(
                self.rebuilder.rebuild(order, task.settings, record.rollout)
                for order, record in zip(orders, records, strict=True)
            )
        )
        again = []
        for record, diff in zip(records, rebuilt, strict=True):
            if isinstance(diff, bytes):
                rollout = rollout_pb2.Rollout()
                rollout.CopyFrom(record.rollout)
                rollout.diff = diff
                again.append(rollout)
        scored = await self.scorer.score(orders[0], again) if again else []
        by_id = {each.rollout.rollout_id: each for each in scored}
        return [
            _result_row(group, record, diff, by_id.get(record.rollout.rollout_id))
            for record, diff in zip(records, rebuilt, strict=True)
        ]


def _order(group: TrainedGroup, rollout: rollout_pb2.Rollout, task_uri: str) -> GroupRequest:
    return GroupRequest(
        group_id=group.group.group_id,
        task_id=group.group.task_id,
        task_uri=task_uri,
        environment=group.tasks.environment,
        indices=(rollout.index,),
        seed=group.group.seed,
        temperature=1.0,
        limits=group.phase.rollout or TrainingRolloutPolicy(),
        purpose=Purpose.EVALUATION,
    )


def _result_row(
    group: TrainedGroup,
    record: journal_pb2.JournalRollout,
    diff: bytes | LeftOut | LostRebuild,
    scored: journal_pb2.JournalRollout | None,
) -> Row:
    match diff:
        case LeftOut(reason):
            return _row(group, record, left_out=reason)
        case LostRebuild(reason):
            return _row(group, record, fault=reason)
        case _:
            assert scored is not None  # noqa: S101 - every change that there is was scored
    reward = scored.reward
    if reward.WhichOneof("result") != "reward":
        return _row(group, record, fault=f"{reward.fault.reason}: {reward.fault.message}")
    return _row(
        group,
        record,
        new_reward=reward.reward,
        new_success=reward.success,
        new_parts={part.name: part.value for part in reward.parts},
    )


def _row(group: TrainedGroup, record: journal_pb2.JournalRollout, **fields: object) -> Row:
    return {
        "rollout_id": record.rollout.rollout_id,
        "group_id": record.rollout.group_id,
        "task_id": group.group.task_id,
        "step": group.global_step,
        "old_reward": record.reward.reward,
        "old_success": record.reward.success,
        "old_parts": {part.name: part.value for part in record.reward.parts},
        **fields,
    }
