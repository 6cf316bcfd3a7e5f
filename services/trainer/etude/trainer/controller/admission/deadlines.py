"""Live groups by deadline, changed group by group; a batch is found without a look at all. Pure.

Deadlines lie within the staleness bound, so that there are few different ones, however many groups
are live.
"""

import heapq
from collections.abc import Iterator, Mapping
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

    def insert(self, group_id: str, due: GroupDeadline) -> None:
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
        if self._num_ready < self.bound.groups_per_step:
            return None
        taken = self._earliest()
        if not self.bound.is_reachable(self._rest(taken), trainer=trainer):
            return None
        return list(self._first(taken))

    def blocking(self, *, trainer: int) -> list[str]:
        """Unfinished groups without which a batch could be picked now, as few as suffice.

        Of several that would do, those that were admitted last: they lose the least work. None if
        too few groups are ready, or nothing is in the way.
        """
        if self._num_ready < self.bound.groups_per_step:
            return []
        total, found = 0, list[str]()
        running: list[tuple[int, str]] = []
        for deadline, groups in self._rest(self._earliest()):
            total += groups
            running += [
                (-due.rank, name)
                for name, due in self._by_deadline[deadline].items()
                if not due.is_ready
            ]
            excess = self.bound.excess(total - len(found), deadline, trainer=trainer)
            if excess > len(running):
                return []  # ready ones are too many as well
            running.sort()
            found += [name for _, name in running[:excess]]
            del running[:excess]
        return found

    def _earliest(self) -> dict[int, int]:
        """Ready groups of the next batch, by deadline."""
        taken: dict[int, int] = {}
        for deadline in sorted(self._ready):
            left = self.bound.groups_per_step - sum(taken.values())
            taken[deadline] = min(len(self._ready[deadline]), left)
        return taken

    def _rest(self, taken: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Deadlines in ascending order, each with the groups that a batch leaves."""
        for deadline in sorted(self._by_deadline):
            yield deadline, len(self._by_deadline[deadline]) - taken.get(deadline, 0)

    def _first(self, taken: Mapping[int, int]) -> Iterator[str]:
        """The taken number of groups of each deadline, the earliest admitted first."""
        for deadline, count in taken.items():
            yield from heapq.nsmallest(
                count, self._ready[deadline], key=lambda name: self._groups[name].rank
            )


def _remove(groups: dict[int, dict[str, GroupDeadline]], deadline: int, group_id: str) -> None:
    del groups[deadline][group_id]
    if not groups[deadline]:
        del groups[deadline]
