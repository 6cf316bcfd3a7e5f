"""Trained groups of a run, read from its journal alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from etude.common.api.run.phases import Phase, TaskSet
from etude.common.blobs import Store
from etude.common.errors import Problem, UserError
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.journal import write_ahead_log
from etude.trainer.controller.journal.ledger import Ledger, StepId
from etude.trainer.replay.history import read_owner
from etude.v1 import journal_pb2, rollout_pb2

_ALL_EPOCHS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedGroup:
    """One group of a trained batch, without its tokens and stored calls."""

    global_step: int
    """That trained it, counted over all phases."""
    phase: Phase
    tasks: TaskSet
    """Task set of its task."""
    group: RolloutGroup

    @property
    def folder(self) -> str:
        """Folder of its task in the task set."""
        return self.group.task_id.removeprefix(f"{self.tasks.name}/")

    @property
    def records(self) -> list[journal_pb2.JournalRollout]:
        """Rollouts that a reward was given, by index."""
        found = [self.group.finished[index] for index in self.group.valid_indices()]
        return [record for record in found if is_scored(record)]


def is_scored(record: journal_pb2.JournalRollout) -> bool:
    """True if a rollout has a reward and no platform fault."""
    is_fault = record.rollout.ending == rollout_pb2.ENDING_PLATFORM_FAULT
    return record.reward.WhichOneof("result") == "reward" and not is_fault


def read_trained_groups(
    store: Store, phases: Sequence[Phase], *, first: int, last: int | None
) -> list[TrainedGroup]:
    """Read the groups of some steps, in the order in which they were trained.

    Args:
        store: of the run; nothing is written to it.
        phases: of the run.
        first: step to begin with, counted over all phases from 1.
        last: step to end with; None for the newest.

    Raises:
        UserError: no such step has trained rollouts, or the spec lacks their phase or task set.
        CorruptError: the journal is damaged.
    """
    uid = read_owner(store)
    journal = write_ahead_log.recover_records(store, run_uid=uid, before_epoch=_ALL_EPOCHS, since=1)
    by_name = {phase.name: phase for phase in phases}
    ledger, numbers = Ledger(), dict[StepId, int]()
    batches = dict[StepId, list[RolloutGroup]]()
    for record in journal.records:
        _remove_tokens(record)
        ledger.apply(record)
        match record.WhichOneof("body"):
            case "batch":
                step = StepId(record.batch.phase, record.batch.step)
                batches[step] = ledger.batches[step]  # a later record may drop rollouts of it
            case "step":
                step = StepId(record.step.phase, record.step.step)
                numbers.setdefault(step, len(numbers) + 1)
            case _:  # of no step
                pass
    found = [
        _find_task_set(numbers[step], group, by_name)
        for step in sorted(batches.keys() & numbers.keys(), key=numbers.__getitem__)
        if first <= numbers[step] and (last is None or numbers[step] <= last)
        for group in batches[step]
    ]
    if not found:
        what = f"has no trained rollouts from step {first} to {last or len(numbers)}"
        fix = f"name steps of reinforcement learning from 1 to {len(numbers)}"
        raise UserError(Problem("NotFound", what, store.url, fix))
    return found


def _remove_tokens(record: journal_pb2.JournalRecord) -> None:
    """Remove the tokens of a rollout, which no reward function reads and which fill the memory."""
    if record.WhichOneof("body") == "rollout":
        for link in record.rollout.rollout.links:
            link.Clear()


def _find_task_set(
    global_step: int, group: RolloutGroup, phases: Mapping[str, Phase]
) -> TrainedGroup:
    """Find the task set that a group's task is of.

    Raises:
        UserError: the spec lacks it; rollouts of users have none.
    """
    phase = phases.get(group.phase)
    sets = phase.tasks or () if phase is not None else ()
    for each in sets:
        if group.task_id.startswith(f"{each.name}/"):
            assert phase is not None  # noqa: S101 - it has the task set
            return TrainedGroup(global_step=global_step, phase=phase, tasks=each, group=group)
    what = f"is of task {group.task_id}, which is in no task set of phase {group.phase}"
    fix = "give the spec that the run had then; rollouts of users cannot be scored again"
    raise UserError(Problem("NotFound", what, f"group {group.group_id}", fix))
