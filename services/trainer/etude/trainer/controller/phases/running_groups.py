"""Running groups of a phase: the task of each, and the rollouts that it runs."""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.trainer.rollouts.protocol import GroupRequest, RolloutWorkers


class RunningGroup(NamedTuple):
    """A group that rollout workers run."""

    task: asyncio.Task[None]
    rollout_ids: tuple[str, ...]


@dataclass(slots=True)
class RunningGroups:
    """Groups that run, by id."""

    _groups: dict[str, RunningGroup] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def add(self, request: GroupRequest, task: asyncio.Task[None]) -> None:
        """Add a group whose request was given to a task."""
        rollout_ids = tuple(map(request.rollout_id, request.indices))
        self._groups[request.group_id] = RunningGroup(task, rollout_ids)

    def remove(self, group_id: str) -> None:
        """Remove a group that has ended."""
        del self._groups[group_id]

    def cancel(self) -> None:
        """Cancel all groups; a successor goes on with them."""
        for group in self._groups.values():
            group.task.cancel()

    def drop(self, group_id: str, workers: RolloutWorkers) -> None:
        """Cancel a group that was dropped, or that is drawn again."""
        group = self._groups.pop(group_id)
        group.task.cancel()
        workers.drop_rollouts(group.rollout_ids)

    async def drop_all(self, workers: RolloutWorkers) -> None:
        """Cancel all groups for good, and wait for their ends."""
        tasks = [group.task for group in self._groups.values()]
        for group_id in list(self._groups):
            self.drop(group_id, workers)
        if tasks:
            await asyncio.wait(tasks)
