"""Rollout buffer: the live groups of one phase, and what changed of them since the last look."""

from collections.abc import Callable
from dataclasses import dataclass, field

from etude.trainer.contents.rollout_checks import PositionOf
from etude.trainer.controller.admission.deadlines import DeadlineIndex, GroupDeadline
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.admission.staleness import StalenessBound
from etude.trainer.controller.journal.ledger import Ledger


@dataclass(slots=True, kw_only=True)
class RolloutBuffer:
    """The live groups of one phase in a ledger; costs follow changes, not the number of groups."""

    ledger: Ledger
    phase: str
    """Name of the phase."""
    group_size: int
    bound: StalenessBound
    position_of: PositionOf
    serving: Callable[[], int]
    """Gives the position that the engines in rotation serve."""
    _index: DeadlineIndex = field(init=False)
    _members: set[str] = field(default_factory=set)
    _changed: dict[str, None] = field(default_factory=dict)
    _undated: dict[str, None] = field(default_factory=dict)
    """Groups without a token, whose deadline moves with the position that is served."""

    def __post_init__(self) -> None:
        self._index = DeadlineIndex(self.bound)
        for group_id in self.ledger.live:
            self.note_change(group_id)

    def __len__(self) -> int:
        return len(self._members)

    def note_change(self, group_id: str) -> None:
        """Note that a group was admitted, or changed, or is no longer live."""
        group = self.ledger.live.get(group_id)
        if group is None:
            self._members.discard(group_id)
            self._changed.pop(group_id, None)
            self._undated.pop(group_id, None)
            self._index.discard(group_id)
        elif group.phase == self.phase:
            self._members.add(group_id)
            self._changed[group_id] = None

    def groups(self) -> list[RolloutGroup]:
        """All groups, in the order of their admission."""
        return [group for group in self.ledger.live.values() if group.phase == self.phase]

    def refresh(self) -> list[RolloutGroup]:
        """Date the groups that changed; return those of them that lack rollouts."""
        changed = [self.ledger.live[name] for name in self._changed]
        self._changed.clear()
        for group in [*changed, *(self.ledger.live[name] for name in self._undated)]:
            self._date(group)
        return [group for group in changed if not self.is_ready(group)]

    def is_ready(self, group: RolloutGroup) -> bool:
        """True if no rollout is missing."""
        return not group.missing_indices(self.group_size)

    def late_groups(self, *, trainer: int) -> list[RolloutGroup]:
        """Groups that can no longer be trained within the bound."""
        return [self.ledger.live[name] for name in self._index.late(trainer=trainer)]

    def pick(self, *, trainer: int) -> list[RolloutGroup] | None:
        """Pick the groups of the next batch; None means wait."""
        picked = self._index.pick(trainer=trainer)
        return None if picked is None else [self.ledger.live[name] for name in picked]

    def blocking(self, *, trainer: int) -> list[RolloutGroup]:
        """Unfinished groups without which a batch could be picked now."""
        return [self.ledger.live[name] for name in self._index.blocking(trainer=trainer)]

    def has_later_deadline(self, group: RolloutGroup) -> bool:
        """True if the group could be trained later if all of it were drawn again now."""
        oldest = group.oldest_bound(self.position_of)
        return oldest is not None and self.bound.deadline(self.serving()) > self.bound.deadline(
            oldest
        )

    def _date(self, group: RolloutGroup) -> None:
        oldest = group.oldest_bound(self.position_of)
        if oldest is None:
            self._undated[group.group_id] = None
        else:
            self._undated.pop(group.group_id, None)
        deadline = self.bound.deadline(self.serving() if oldest is None else oldest)
        self._index.insert(
            group.group_id, GroupDeadline(deadline, group.sequence, self.is_ready(group))
        )
