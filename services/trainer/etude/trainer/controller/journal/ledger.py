"""Ledger of the rollout buffer: a fold over journal records, the same live and on resume."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from etude.common.errors import CorruptError
from etude.common.weights import VersionId
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.journal.lengths import LengthTotals
from etude.v1 import journal_pb2

KEPT_VERSIONS = 256
"""Versions whose positions are remembered: far more than any staleness bound."""

MASKED = frozenset({"platform", "invalid_span", "erased", "damaged"})
"""Reasons to drop single rollouts whose siblings are trained without them."""
REDRAWN = frozenset({"quarantined_policy", "suspect_policy", "rolled_back_policy", "slow"})
"""Reasons to redraw single rollouts: neither task nor policy is at fault."""
WINDOW_REASONS = frozenset(
    {
        *("other_policy", "frozen_window", "expired", "too_few_rollouts", "damaged_window"),
        "kl_budget",
    }
)
"""Reasons to drop a window of production rollouts, or what is left of it."""
DROP_REASONS = frozenset({"stale", "surplus"}) | MASKED | REDRAWN | WINDOW_REASONS
"""All reasons to drop an accepted rollout."""


def ignore_group(_group_id: str) -> None:
    """Take no notice of a change."""


class StepId(NamedTuple):
    """One optimiser step of one phase."""

    phase: str
    number: int


class FrozenStep(NamedTuple):
    """A step after which a monitor stopped a phase."""

    phase: str
    number: int
    monitor: str
    sentence: str


class LedgerState(BaseModel):
    """Part of the ledger in a checkpoint; the journal has the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    consumed: list[str] = Field(default_factory=list)
    """Ids of admitted tasks, in order; none is admitted twice."""
    live: dict[str, int] = Field(default_factory=dict)
    """Groups that are neither trained nor dropped, with the sequence of their ADMIT."""
    batches: list[StepId] = Field(default_factory=list)
    """Steps whose batches are journaled and not in the weights; their groups are among the live."""
    trained_groups: dict[str, int] = Field(default_factory=dict)
    """Groups in batches, by phase."""
    results: dict[str, float] = Field(default_factory=dict)
    """Mean reward of each task in a batch, in the order of batches; empty in checkpoints of earlier
    releases."""
    versions: list[tuple[int, int, int]] = Field(default_factory=list)
    """Epoch, number and step of published versions, oldest first."""
    accepted: int = 0
    trained: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)
    lengths: LengthTotals = Field(default_factory=LengthTotals)
    frozen: list[FrozenStep] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _without_cursors(cls, values: JsonValue) -> JsonValue:
        """Drop the next position of each phase, which checkpoints of earlier releases have."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name != "cursors"}


@dataclass(slots=True)
class Ledger:
    """Account of all groups and rollouts. Every change is a journal record: append, then apply."""

    consumed: dict[str, None] = field(default_factory=dict)
    live: dict[str, RolloutGroup] = field(default_factory=dict)
    batches: dict[StepId, list[RolloutGroup]] = field(default_factory=dict)
    """Batches that are not yet trained into the current weights."""
    trained_groups: Counter[str] = field(default_factory=Counter)
    results: dict[str, float] = field(default_factory=dict)
    """Mean reward of each task in a batch, in the order of batches."""
    versions: dict[VersionId, int] = field(default_factory=dict)
    """Step at which each version was published: its position along the accepted chain.

    A version of an abandoned epoch keeps its step, because the batches behind it are trained again
    from the journal, in the same order, before anything else is."""
    accepted: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lengths: LengthTotals = field(default_factory=LengthTotals)
    frozen: dict[tuple[str, str], FrozenStep] = field(default_factory=dict)
    """The newest of each phase and monitor."""
    on_change: Callable[[str], None] = ignore_group
    """Called with the id of a group after it was admitted, or changed, or ended."""

    @property
    def queued(self) -> int:
        """Number of accepted rollouts that are neither trained nor dropped."""
        return sum(len(group.valid_indices()) for group in self.live.values())

    @property
    def masked(self) -> int:
        """Number of rollouts that were left out of their groups."""
        return sum(count for reason, count in self.dropped.items() if reason in MASKED)

    @property
    def discarded(self) -> int:
        """Number of valid rollouts that were dropped."""
        return self.dropped.total() - self.masked

    def apply(self, record: journal_pb2.JournalRecord) -> None:
        """Apply one record.

        Raises:
            CorruptError: the record contradicts those before it.
        """
        match record.WhichOneof("body"):
            case "admit":
                self._apply_admit(record.admit, record.sequence)
            case "rollout":
                self._apply_rollout(record.rollout)
            case "drop":
                self._apply_drop(record.drop)
            case "restart":
                self._apply_restart(record.restart)
            case "batch":
                self._apply_batch(record.batch)
            case "published":
                body = record.published
                self._apply_published(VersionId(body.epoch, body.number), body.step)
            case "freeze":
                stop = record.freeze
                self.frozen[stop.phase, stop.monitor] = FrozenStep(
                    stop.phase, stop.step, stop.monitor, stop.sentence
                )
            case _:  # does not concern groups
                pass

    def _apply_admit(self, body: journal_pb2.JournalAdmit, sequence: int) -> None:
        if body.task_id in self.consumed:
            raise CorruptError(f"record {sequence}: task {body.task_id} was admitted before")
        self.consumed[body.task_id] = None
        self.live[body.group_id] = _new_group(body, sequence)
        self.on_change(body.group_id)

    def _apply_rollout(self, body: journal_pb2.JournalRollout) -> None:
        group = self.live.get(body.rollout.group_id)
        if group is None or body.rollout.index in group.finished:
            return  # delivered again: counted once
        if body.rollout.rollout_id in group.spent:
            return  # delivered again after it was dropped
        group.finished[body.rollout.index] = body
        self.accepted += 1
        self.on_change(group.group_id)

    def _apply_drop(self, body: journal_pb2.JournalDrop) -> None:
        if body.reason not in DROP_REASONS:
            raise CorruptError(f"group {body.group_id} was dropped for {body.reason!r}")
        group = self.live.get(body.group_id)
        if group is None:
            removed = self._drop_from_batch(body)
            self.trained -= removed
            self.dropped[body.reason] += removed
            return
        for record in _named_rollouts(group, body):
            self.lengths.add_lost(record)
        if body.rollout_id:
            self.dropped[body.reason] += _remove_rollout(group, body)
        else:
            self.dropped[body.reason] += len(group.valid_indices())
            del self.live[body.group_id]
        self.on_change(body.group_id)

    def _apply_restart(self, body: journal_pb2.JournalRestart) -> None:
        group = self.live.get(body.group_id)
        if group is None:
            raise CorruptError(f"group {body.group_id} is drawn again, and is not live")
        group.restarts, group.admitted = group.restarts + 1, body.serving
        self.on_change(body.group_id)

    def _drop_from_batch(self, body: journal_pb2.JournalDrop) -> int:
        """Drop a rollout of a batch that is trained again, and goes without it; return 1 if so."""
        groups = [each for groups in self.batches.values() for each in groups]
        group = next((each for each in groups if each.group_id == body.group_id), None)
        if group is not None and body.rollout_id and body.reason in MASKED:
            return _remove_rollout(group, body)
        return 0

    def _add_batch(self, body: journal_pb2.JournalBatch) -> list[RolloutGroup]:
        """Move the groups of a batch out of those that are live.

        Raises:
            CorruptError: one is not live.
        """
        step = StepId(body.phase, body.step)
        missing = [group_id for group_id in body.group_ids if group_id not in self.live]
        if missing:
            raise CorruptError(f"step {step.number} of {step.phase} trains {missing[0]} again")
        groups = [self.live.pop(group_id) for group_id in body.group_ids]
        self.batches[step] = groups
        penalties: defaultdict[str, float] = defaultdict(float)
        for each in body.penalties:
            penalties[each.rollout_id] += each.amount
        for group in groups:
            group.penalties = penalties
        return groups

    def _apply_batch(self, body: journal_pb2.JournalBatch) -> None:
        groups = self._add_batch(body)
        for group in groups:
            trained = [group.finished[index] for index in group.valid_indices()]
            for record in trained:
                self.trained += 1
                self.lengths.add_trained(record)
            if trained:
                self.results[group.task_id] = fmean(record.reward.reward for record in trained)
        self.trained_groups[body.phase] += len(groups)
        for group in groups:
            self.on_change(group.group_id)

    def _apply_published(self, version: VersionId, step: int) -> None:
        self.versions[version] = step
        while len(self.versions) > KEPT_VERSIONS:
            del self.versions[next(iter(self.versions))]

    def forget_batch(self, step: StepId) -> list[RolloutGroup]:
        """Forget a batch that is in the weights now."""
        return self.batches.pop(step)

    def checkpoint_state(self) -> LedgerState:
        """State for a checkpoint, with the batches that are not in the weights yet."""
        untrained = [group for groups in self.batches.values() for group in groups]
        groups = [*untrained, *self.live.values()]
        return LedgerState(
            consumed=list(self.consumed),
            live={group.group_id: group.sequence for group in groups},
            batches=list(self.batches),
            trained_groups=dict(self.trained_groups),
            results=dict(self.results),
            versions=[(v.epoch, v.number, step) for v, step in self.versions.items()],
            accepted=self.accepted,
            trained=self.trained,
            dropped=dict(self.dropped),
            lengths=self.lengths.model_copy(),
            frozen=list(self.frozen.values()),
        )


def resume_ledger(
    state: LedgerState, records: Iterable[journal_pb2.JournalRecord], *, sequence: int
) -> Ledger:
    """Rebuild the ledger from a checkpoint and the records behind it.

    Args:
        state: as the checkpoint kept it.
        records: accepted records in order, from the first ADMIT of a live group on.
        sequence: newest record that the checkpoint knew.

    Raises:
        CorruptError: the records contradict the checkpoint or each other.
    """
    ledger = Ledger(
        consumed=dict.fromkeys(state.consumed),
        trained_groups=Counter(state.trained_groups),
        results=dict(state.results),
        versions={VersionId(epoch, number): step for epoch, number, step in state.versions},
        accepted=state.accepted,
        trained=state.trained,
        dropped=Counter(state.dropped),
        lengths=state.lengths.model_copy(),
        frozen={(each.phase, each.monitor): each for each in state.frozen},
    )
    seen: set[str] = set()
    for record in records:
        if record.WhichOneof("body") == "admit":
            seen.add(record.admit.group_id)
        if record.sequence <= sequence:
            _refill(ledger, record, state)
        else:
            ledger.apply(record)
    if lost := state.live.keys() - seen:
        raise CorruptError(f"the journal does not hold group {min(lost)} of the checkpoint")
    return ledger


def _refill(ledger: Ledger, record: journal_pb2.JournalRecord, state: LedgerState) -> None:
    """Restore groups that were live or in batches of the checkpoint, which has counted them."""
    match record.WhichOneof("body"):
        case "admit" if record.admit.group_id in state.live:
            ledger.live[record.admit.group_id] = _new_group(record.admit, record.sequence)
        case "rollout" if record.rollout.rollout.group_id in ledger.live:
            rollout = record.rollout.rollout
            group = ledger.live[rollout.group_id]
            if rollout.rollout_id not in group.spent:
                group.finished.setdefault(rollout.index, record.rollout)
        case "drop" if record.drop.group_id in ledger.live and record.drop.rollout_id:
            _remove_rollout(ledger.live[record.drop.group_id], record.drop)
        case "restart" if record.restart.group_id in ledger.live:
            ledger._apply_restart(record.restart)
        case "drop":
            ledger._drop_from_batch(record.drop)
        case "batch" if StepId(record.batch.phase, record.batch.step) in state.batches:
            ledger._add_batch(record.batch)
        case _:
            pass


def _named_rollouts(
    group: RolloutGroup, body: journal_pb2.JournalDrop
) -> list[journal_pb2.JournalRollout]:
    """Finished rollouts of a live group that a record drops."""
    found = [group.finished[index] for index in group.valid_indices()]
    return [r for r in found if body.rollout_id in {"", r.rollout.rollout_id}]


def _remove_rollout(group: RolloutGroup, body: journal_pb2.JournalDrop) -> int:
    """Remove one rollout from its group; return the number removed."""
    named = {i for i, r in group.finished.items() if r.rollout.rollout_id == body.rollout_id}
    new = named - group.masked
    if body.reason in REDRAWN:
        for index in new:
            group.remove_finished(index)
            group.spent[body.rollout_id] = index
    else:
        group.masked |= new
    return len(new)


def _new_group(body: journal_pb2.JournalAdmit, sequence: int) -> RolloutGroup:
    return RolloutGroup(
        group_id=body.group_id,
        phase=body.phase,
        position=body.position,
        task_id=body.task_id,
        seed=body.seed,
        sequence=sequence,
        admitted=body.serving if body.HasField("serving") else None,
    )
