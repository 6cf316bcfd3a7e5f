"""Shuffled order of a phase's tasks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class UsedTasks:
    """Tasks that the phases so far use, as far as that is known before they run."""

    _known: set[str] = field(default_factory=set)
    _chosen: list[tuple[frozenset[str], int]] = field(default_factory=list)
    """Tasks of each phase whose curriculum chooses, and the number that it trains."""

    def count_left(self, order: TaskOrder) -> int:
        """Number of tasks that are left for a phase, whatever earlier curricula choose."""
        left = set(order.ids()) - self._known
        return len(left) - sum(min(count, len(left & ids)) for ids, count in self._chosen)

    def add_phase(self, order: TaskOrder, needed: int, *, is_ordered: bool) -> None:
        """Add the tasks of a phase, the first of its order unless a curriculum chooses."""
        left = [task_id for task_id in order.ids() if task_id not in self._known]
        # After a curriculum, the first tasks of an order may be used already.
        if is_ordered and not any(ids & set(left) for ids, _ in self._chosen):
            self._known.update(left[:needed])
        else:
            self._chosen.append((frozenset(left), needed))
