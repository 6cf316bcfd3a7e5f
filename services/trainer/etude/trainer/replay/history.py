"""Recorded steps of a run between a checkpoint and a step, read from its store alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etude.common.api.run.phases import Phase
from etude.common.blobs import MissingError, Store
from etude.common.checkpoints import manifest
from etude.common.checkpoints.manifest import StoredCheckpoint
from etude.common.errors import Problem, UserError
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.checkpoints import lineage
from etude.trainer.controller.checkpoints.lineage import Branch
from etude.trainer.controller.checkpoints.recovery import OWNER, initial_state
from etude.trainer.controller.checkpoints.state import ControllerState, Cursor, read_state
from etude.trainer.controller.journal import write_ahead_log
from etude.trainer.controller.journal.ledger import Ledger, StepId, resume_ledger
from etude.v1 import journal_pb2

_ALL_EPOCHS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One optimiser step as the journal has it."""

    global_step: int
    """Counted over all phases."""
    phase: Phase
    number: int
    """Counted within the phase."""
    groups: Sequence[RolloutGroup]
    """Of its batch; none of a supervised phase."""
    results: Sequence[journal_pb2.JournalStep]
    """One for each time that the step was trained, the accepted one last."""

    @property
    def result(self) -> journal_pb2.JournalStep:
        """The accepted result."""
        return self.results[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHistory:
    """Steps that lead from a checkpoint to a requested step."""

    run_uid: str
    checkpoint: StoredCheckpoint | None
    """None: the run's start weights."""
    cursor: Cursor
    """Position at the checkpoint."""
    ledger: Ledger
    """After the newest record."""
    steps: Sequence[RecordedStep]
    """In order; the last one is the requested one."""
    problems: Sequence[str]
    """Damaged checkpoints that were passed over."""


class _Start(NamedTuple):
    state: ControllerState
    checkpoint: StoredCheckpoint | None
    problems: list[str]


def read_owner(store: Store) -> str:
    """UID of the run whose prefix the store is opened at.

    Raises:
        UserError: no run was ever started there.
    """
    try:
        return store.get(OWNER).decode(errors="replace")
    except MissingError as cause:
        fix = "give the folder of a run that was started, or its storage.uri"
        raise UserError(Problem("NotFound", "holds no run", store.url, fix)) from cause


def read_history(store: Store, phases: Sequence[Phase], *, step: int) -> StepHistory:
    """Read the steps from the newest intact checkpoint before a step up to that step.

    Args:
        store: of the run; nothing is written to it.
        phases: of the run, in order.
        step: the requested one, counted over all phases from 1.

    Raises:
        UserError: the run has not recorded the step, or its phase cannot be replayed.
        CorruptError: the journal is damaged.
    """
    uid = read_owner(store)
    opening = write_ahead_log.newest_open_record(store, run_uid=uid)
    if opening is None:
        raise UserError(_missing_step(store, step, newest=0))
    branch = Branch.from_proto(opening.branch)
    start = _find_start(store, uid, phases, branch=branch, before=step)
    journal = write_ahead_log.recover_records(
        store, run_uid=uid, before_epoch=_ALL_EPOCHS, since=start.state.replay_from
    )
    ledger = resume_ledger(start.state.ledger, journal.records, sequence=start.state.sequence)
    new = (each for each in journal.records if each.sequence > start.state.sequence)
    results = _results_by_step(new)
    first = start.state.cursor.global_step
    if step > first + len(results):
        raise UserError(_missing_step(store, step, newest=first + len(results)))
    by_name = {phase.name: phase for phase in phases}
    steps = [
        _recorded_step(first + place, each, results[each], ledger, by_name)
        for place, each in enumerate(list(results)[: step - first], start=1)
    ]
    return StepHistory(
        run_uid=uid,
        checkpoint=start.checkpoint,
        cursor=start.state.cursor,
        ledger=ledger,
        steps=steps,
        problems=start.problems,
    )


def _find_start(
    store: Store, uid: str, phases: Sequence[Phase], *, branch: Branch, before: int
) -> _Start:
    """Find the newest intact checkpoint of the present branch before a step, or the start."""
    places = lineage.ancestors(manifest.list_checkpoints(store), branch)
    problems: list[str] = []
    candidates = [place for place in places if place.step < before]
    found = manifest.first_intact(store, candidates, run=uid, problems=problems)
    state = initial_state(uid, phases) if found is None else read_state(store, found)
    return _Start(state, found, problems)


def _results_by_step(
    records: Iterable[journal_pb2.JournalRecord],
) -> dict[StepId, list[journal_pb2.JournalStep]]:
    """Results of each step, in the order in which the steps were first trained."""
    found: dict[StepId, list[journal_pb2.JournalStep]] = {}
    for record in records:
        if record.WhichOneof("body") == "step":
            key = StepId(record.step.phase, record.step.step)
            found.setdefault(key, []).append(record.step)
    return found


def _recorded_step(
    global_step: int,
    step: StepId,
    results: Sequence[journal_pb2.JournalStep],
    ledger: Ledger,
    phases: dict[str, Phase],
) -> RecordedStep:
    """One step with the groups of its batch.

    Raises:
        UserError: the spec lacks its phase, or its batch is not in the journal.
    """
    where = f"step {global_step}, {step.number} of phase {step.phase}"
    phase = phases.get(step.phase)
    if phase is None:
        what = f"is of a phase that the spec lacks; it has {', '.join(phases)}"
        raise UserError(Problem("PhasesChanged", what, where, "give the spec the run had then"))
    if phase.feedback is not None:
        what = "trained rollouts of users, which are kept apart and may be erased"
        fix = "replay a step of another phase"
        raise UserError(Problem("Unsupported", what, where, fix))
    groups = ledger.batches.get(step, ())
    if phase.algorithm is not None and not any(group.finished for group in groups):
        what = "has no rollouts in the journal any more"
        fix = "choose a later step: its batch and all after it must be there"
        raise UserError(Problem("NotFound", what, where, fix))
    return RecordedStep(
        global_step=global_step, phase=phase, number=step.number, groups=groups, results=results
    )


def _missing_step(store: Store, step: int, *, newest: int) -> Problem:
    what = f"step {step} is not recorded" + (f"; the newest is {newest}" if newest else "")
    fix = f"choose a step from 1 to {newest}" if newest else "wait for the first step"
    return Problem("NotFound", what, store.url, fix)
