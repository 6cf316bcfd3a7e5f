"""Live groups by deadline, changed group by group; a batch is found without a look at all. Pure.

Deadlines lie within the staleness bound, so that there are few different ones, however many groups
are live.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.trainer.controller.admission.staleness import StalenessBound


class GroupDeadline(NamedTuple):
    """A live group, and the last position of the trainer at which it may still be trained."""

    deadline: int
    rank: int
    """Order among groups of one deadline: earlier admitted ones first."""
    is_ready: bool
    """True if it is completely scored."""


@dataclass(slots=True)
class DeadlineIndex:
    """The live groups of a phase, by deadline."""

    bound: StalenessBound
    _groups: dict[str, GroupDeadline] = field(default_factory=dict)
    _by_deadline: dict[int, dict[str, GroupDeadline]] = field(default_factory=dict)
    _ready: dict[int, dict[str, GroupDeadline]] = field(default_factory=dict)
    """Those of them that are ready."""
    _num_ready: int = 0

    def put(self, group_id: str, due: GroupDeadline) -> None:
        """Add a group, or replace what is known of it."""
        self.discard(group_id)
        self._groups[group_id] = due
        self._by_deadline.setdefault(due.deadline, {})[group_id] = due
        if due.is_ready:
            self._ready.setdefault(due.deadline, {})[group_id] = due
            self._num_ready += 1

    def discard(self, group_id: str) -> None:
        """Remove a group, if it is known."""
        due = self._groups.pop(group_id, None)
        if due is None:
            return
        _remove(self._by_deadline, due.deadline, group_id)
        if due.is_ready:
            _remove(self._ready, due.deadline, group_id)
            self._num_ready -= 1

    def late(self, *, trainer: int) -> list[str]:
        """Groups that can no longer be trained within the bound, the earliest admitted first."""
        found = [
            (due.rank, group_id)
            for deadline, groups in self._by_deadline.items()
            if self.bound.is_late(deadline, trainer=trainer)
            for group_id, due in groups.items()
        ]
        return [group_id for _, group_id in sorted(found)]

    def pick(self, *, trainer: int) -> list[str] | None:
        """Pick the groups of the next batch, earliest deadline first; None means wait.

        Args:
            trainer: batches trained so far. No ready group is late.
        """
        wanted = self.bound.groups_per_step
        if self._num_ready < wanted:
            return None
        taken: dict[int, int] = {}
        for deadline in sorted(self._ready):
            taken[deadline] = min(len(self._ready[deadline]), wanted - sum(taken.values()))
        rest = (
            (deadline, len(self._by_deadline[deadline]) - taken.get(deadline, 0))
            for deadline in sorted(self._by_deadline)
        )
        if not self.bound.is_reachable(rest, trainer=trainer):
            return None
        return list(self._first(taken))

    def _first(self, taken: dict[int, int]) -> Iterator[str]:
        """So many groups of each deadline, the earliest admitted first."""
        for deadline, count in taken.items():
            yield from heapq.nsmallest(
                count, self._ready[deadline], key=lambda name: self._groups[name].rank
            )


def _remove(groups: dict[int, dict[str, GroupDeadline]], deadline: int, group_id: str) -> None:
    del groups[deadline][group_id]
    if not groups[deadline]:
        del groups[deadline]
