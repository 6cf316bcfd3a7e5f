"""Shuffled order of a phase's tasks."""

from collections.abc import Iterator
from dataclasses import dataclass

from etude.trainer.rollouts.tasks import Task
from etude.trainer.seeding import permute_index


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """The tasks of one phase, shuffled by its seed; no task occurs twice."""

    tasks: tuple[Task, ...]
    seed: int

    def __post_init__(self) -> None:
        if len({task.task_id for task in self.tasks}) != len(self.tasks):
            raise ValueError("a task occurs twice")

    def __len__(self) -> int:
        return len(self.tasks)

    def ids(self) -> Iterator[str]:
        return (self.task_at(position).task_id for position in range(len(self)))

    def task_at(self, position: int) -> Task:
        """Task at a position of the order."""
        return self.tasks[permute_index(position, size=len(self.tasks), seed=self.seed)]
