"""Choice of a rollout worker for a group: near its siblings where loads permit.

A worker knows which engine has a group's prompt cached, and holds the snapshot that its siblings
started from. Siblings that are drawn again are cheapest there.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

BUSY_RATIO = 1.25
"""Load of a group's worker over the mean, above which its siblings go elsewhere."""
KEPT_GROUPS = 4_096
"""Groups whose workers are remembered: those that ran last."""


@dataclass(slots=True)
class WorkerChoice:
    """Workers of groups that ran before."""

    _last: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def choose(self, group_id: str, loads: Sequence[int]) -> int:
        """Choose a worker and remember it.

        Args:
            group_id: of the group.
            loads: rollouts under way of each worker that takes groups.

        Returns:
            The worker that ran the group before, unless its load is more than 1.25 times the mean;
            else the least loaded one.
        """
        chosen = choose_worker(loads, last=self._last.get(group_id))
        self._last[group_id] = chosen
        self._last.move_to_end(group_id)
        if len(self._last) > KEPT_GROUPS:
            self._last.popitem(last=False)
        return chosen


def choose_worker(loads: Sequence[int], *, last: int | None) -> int:
    """Choose a worker by loads, and by the one that ran the group last; pure."""
    mean = sum(loads) / len(loads)
    if last is not None and last < len(loads) and loads[last] <= BUSY_RATIO * mean:
        return last
    return loads.index(min(loads))
