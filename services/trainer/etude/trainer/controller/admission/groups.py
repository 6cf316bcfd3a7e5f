"""Groups of the rollout buffer: sibling rollouts from admission to batch."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from etude.common.errors import InvalidFieldError, WrongStateError
from etude.common.weights import VersionId
from etude.trainer.contents.rollout_checks import PositionOf
from etude.trainer.learner.batches import (
    PolicyBatch,
    PolicySequence,
    StoredRollout,
    links_of,
)
from etude.trainer.rollouts.protocol import name_rollout
from etude.v1 import journal_pb2, rollout_pb2


@dataclass(slots=True, kw_only=True)
class RolloutGroup:
    """An admitted task with its finished rollouts."""

    group_id: str
    phase: str
    position: int
    """In the phase's task order."""
    task_id: str
    seed: int
    sequence: int
    """Sequence of its ADMIT record, from which a checkpoint with this group replays."""
    finished: dict[int, journal_pb2.JournalRollout] = field(default_factory=dict)
    """By index among its siblings."""
    masked: set[int] = field(default_factory=set)
    """Indices that a DROP removed."""
    spent: dict[str, int] = field(default_factory=dict)
    """Index of each rollout that was dropped to be redrawn, by its id."""
    restarts: int = 0
    """Times that all of its rollouts were drawn again, because they were slow."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Subtracted from the reward in its batch, by id of the rollout."""
    admitted: int | None = None
    """Oldest position that engines served when it was admitted, or drawn again; None in older
    journals."""
    serving: int | None = None
    """Oldest position that engines served when its rollouts started; unset while none runs."""
    _oldest: dict[int, VersionId] = field(default_factory=dict)
    """Oldest version of each finished rollout, by index; decoded once."""

    def missing_indices(self, size: int) -> list[int]:
        """Indices without a finished rollout."""
        return [index for index in range(size) if index not in self.finished]

    def draws(self, size: int) -> tuple[int, ...]:
        """Number of earlier draws of each sibling; its next id is a new one."""
        return tuple(self._count_draws(index) for index in range(size))

    def _count_draws(self, index: int) -> int:
        drawn = self.restarts + list(self.spent.values()).count(index)
        # Journals of earlier releases say nothing of restarts.
        while name_rollout(self.group_id, index, drawn=drawn) in self.spent:
            drawn += 1
        return drawn

    def faulty_indices(self) -> list[int]:
        """Indices without a reward and without a DROP."""
        return [
            index
            for index, record in sorted(self.finished.items())
            if record.reward.WhichOneof("result") != "reward" and index not in self.masked
        ]

    def valid_indices(self) -> list[int]:
        """Indices that take part in training."""
        return [index for index in sorted(self.finished) if index not in self.masked]

    def oldest_position(self, position_of: PositionOf) -> int | None:
        """Position of the oldest version that touched any token of a valid rollout."""
        positions = [
            position
            for index in self.finished
            if index not in self.masked
            and (position := position_of(self._oldest_version(index))) is not None
        ]
        return min(positions, default=None)

    def oldest_bound(self, position_of: PositionOf) -> int | None:
        """Oldest position of its finished rollouts, and of those that still run.

        None if no rollout is finished or running. A group that is resumed or redrawn keeps the
        age of its finished siblings.
        """
        known = (self.oldest_position(position_of), self.serving)
        return min((each for each in known if each is not None), default=None)

    def _oldest_version(self, index: int) -> VersionId:
        """Oldest version of a finished rollout; each group is asked at each change of any."""
        if index not in self._oldest:
            self._oldest[index] = oldest_version(self.finished[index].rollout)
        return self._oldest[index]

    def remove_finished(self, index: int) -> None:
        """Remove a finished rollout, to be redrawn."""
        del self.finished[index]
        self._oldest.pop(index, None)


def oldest_version(rollout: rollout_pb2.Rollout) -> VersionId:
    """The oldest version that sampled a token, or whose cached context a token attended to."""
    return VersionId.from_proto(rollout.oldest)


def check_reward(record: journal_pb2.JournalRollout) -> None:
    """Refuse a reward that is not usable.

    Raises:
        InvalidFieldError: it is NaN, infinite, or beyond a million.
    """
    reward = record.reward.reward
    if not math.isfinite(reward) or abs(reward) > 1e6:
        raise InvalidFieldError("reward", f"{reward} is not a usable number")


def refuse_unrewarded(groups: Iterable[RolloutGroup]) -> None:
    """Refuse a batch in which a rollout takes part that has no reward.

    Raises:
        WrongStateError: it does; it would be trained as one of reward 0.
    """
    for group in groups:
        for index in group.faulty_indices():
            name = group.finished[index].rollout.rollout_id
            raise WrongStateError(f"rollout {name} has no reward, and is not masked")


def build_policy_batch(
    groups: Sequence[RolloutGroup], *, current: Collection[VersionId] = ()
) -> PolicyBatch:
    """Build the learner's batch: groups in this order, siblings by index.

    Args:
        groups: of one step.
        current: versions with exactly the weights of the step.

    Raises:
        WrongStateError: a rollout that takes part has no reward.
    """
    refuse_unrewarded(groups)
    sequences: list[PolicySequence] = []
    rewards: list[float] = []
    siblings: list[int] = []
    valid: list[bool] = []
    stored: list[StoredRollout] = []
    for number, group in enumerate(groups):
        for index in sorted(group.finished):
            record = group.finished[index]
            is_valid = index not in group.masked
            if is_valid and record.HasField("content"):
                content = record.content.SerializeToString()
                stored.append(StoredRollout(len(rewards), record.rollout.rollout_id, content))
            elif is_valid:
                sequences += links_of(record.rollout, index=len(rewards), current=current)
            penalty = group.penalties.get(record.rollout.rollout_id, 0.0)
            rewards.append(record.reward.reward - penalty if is_valid else 0.0)
            siblings.append(number)
            valid.append(is_valid)
    return PolicyBatch(
        sequences=tuple(sequences),
        stored=tuple(stored),
        current=frozenset(current),
        rewards=np.asarray(rewards, dtype=np.float64),
        groups=np.asarray(siblings, dtype=np.int64),
        valid=np.asarray(valid, dtype=np.bool_),
    )
