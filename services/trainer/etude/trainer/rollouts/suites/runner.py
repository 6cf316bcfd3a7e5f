"""Suites of an evaluation: rollouts of every task, by whatever runs groups.

A run's controller and a program without one differ in who runs a group and in what marks weights.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.rollouts.scoring import mask_rollout
from etude.trainer.rollouts.tasks import Task
from etude.trainer.routing.table import Purpose
from etude.trainer.seeding import derive_seed
from etude.v1 import journal_pb2

REDRAWS = 3
"""Redraws of a rollout that a marked engine sampled; after that it counts as lost."""

Records = Sequence[journal_pb2.JournalRollout]
Marks = Mapping[str, str]
"""Reason by id of each rollout that marked weights sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePass:
    """One pass over the tasks of a suite."""

    prefix: str
    """Prefix of the ids of its groups, which no other pass of the run has."""
    tasks: Sequence[Task]
    samples: int
    """Rollouts of each task; seeds follow from their ids."""
    temperature: float
    """0 is greedy."""
    seed: int
    limits: RolloutPolicy

    def requests(self) -> list[GroupRequest]:
        """One group request for each task, with the samples as siblings."""
        names = [f"{self.prefix}-{index}" for index in range(len(self.tasks))]
        return [
            GroupRequest(
                group_id=name,
                task_id=task.task_id,
                task_uri=task.uri,
                environment=task.environment,
                indices=tuple(range(self.samples)),
                seed=derive_seed(self.seed, name),
                temperature=self.temperature,
                purpose=Purpose.EVALUATION,
                limits=self.limits,
            )
            for name, task in zip(names, self.tasks, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRunner:
    """Runs passes; rollouts that marked weights sampled are redrawn, then masked."""

    run_group: Callable[[GroupRequest], Awaitable[Records]]
    """Runs and scores the requested siblings of one group."""
    find_marked: Callable[[Records], Awaitable[Marks]]
    on_redraw: Callable[[Marks], None]

    async def run(self, suite: SuitePass) -> list[journal_pb2.JournalRollout]:
        """One record per task and sample, in no order; those that the platform lost are masked."""
        requests = suite.requests()
        records = await self._run_all(requests)
        marked = await self.find_marked(records)
        for draw in range(1, REDRAWS + 1):
            if not marked:
                break
            self.on_redraw(marked)
            sound = [each for each in records if each.rollout.rollout_id not in marked]
            lost = [each for each in records if each.rollout.rollout_id in marked]
            records = sound + await self._run_all(_redraw(requests, lost, draw))
            marked = await self.find_marked(records)
        for record in records:
            if (why := marked.get(record.rollout.rollout_id)) is not None:
                mask_rollout(record, f"{why}, after {REDRAWS} redraws", reason="SuspectPolicy")
        return records

    async def _run_all(self, requests: Iterable[GroupRequest]) -> list[journal_pb2.JournalRollout]:
        async with asyncio.TaskGroup() as group:
            pending = [
                group.create_task(self._run_group(request), name=request.group_id)
                for request in requests
            ]
        return [record for task in pending for record in task.result()]

    async def _run_group(self, request: GroupRequest) -> Records:
        return await self.run_group(request)


def _redraw(requests: Sequence[GroupRequest], lost: Records, draw: int) -> list[GroupRequest]:
    """Requests for the lost siblings alone, with new ids."""
    indices: dict[str, list[int]] = {}
    for record in lost:
        indices.setdefault(record.rollout.group_id, []).append(record.rollout.index)
    return [
        replace(
            request,
            indices=tuple(sorted(indices[request.group_id])),
            draws=(draw,) * len(request.indices),
        )
        for request in requests
        if request.group_id in indices
    ]
