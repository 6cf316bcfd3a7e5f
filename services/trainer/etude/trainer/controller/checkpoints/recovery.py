"""Recovery: a controller takes over a run from its newest checkpoint and the journal behind it."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etude.common.api.run.phases import Phase
from etude.common.blobs import ExistsError, Store
from etude.common.checkpoints import manifest
from etude.common.checkpoints.manifest import StoredCheckpoint
from etude.common.durable_log import LogEnd
from etude.common.errors import CorruptError, Problem, UserError
from etude.common.role_inputs import ResumeAt
from etude.common.weights import VersionId, claim_epoch, read_epoch
from etude.trainer.controller.checkpoints import lineage
from etude.trainer.controller.checkpoints.lineage import Branch
from etude.trainer.controller.checkpoints.state import ControllerState, Cursor, Figures, read_state
from etude.trainer.controller.journal import write_ahead_log
from etude.trainer.controller.journal.ledger import Ledger, LedgerState, resume_ledger
from etude.trainer.controller.journal.record_parts import PreparedRecord, prepare_record
from etude.trainer.controller.journal.write_ahead_log import Journal
from etude.v1 import journal_pb2

OWNER = "owner"
"""Object that names the run that owns the storage. Created once, before any fencing."""


@dataclass(slots=True)
class JournaledLedger:
    """Journal and ledger, always written together."""

    journal: Journal
    ledger: Ledger

    def write(self, record: journal_pb2.JournalRecord) -> int:
        """Append a record and apply it to the ledger; return its sequence."""
        return self.write_prepared(prepare_record(record))

    def write_prepared(self, prepared: PreparedRecord) -> int:
        """Write a record that was prepared, in a thread if it is large."""
        sequence = self.journal.append_prepared(prepared)
        self.ledger.apply(prepared.record)
        return sequence


class OpenedRun(NamedTuple):
    """A run that this process now owns."""

    epoch: int
    book: JournaledLedger
    cursor: Cursor
    figures: Figures
    checkpoint: StoredCheckpoint | None
    """The checkpoint that the learner must restore."""
    next_version: int
    """Smallest number that may be published."""
    problems: list[str]
    """Damaged checkpoints that were skipped."""
    is_new: bool
    """True if nothing was recorded before."""
    branch: Branch
    """The run's branch of checkpoints from here on."""
    is_restored: bool
    """True if the run was just restored to an older checkpoint."""


class _StartPoint(NamedTuple):
    """Starting point of a controller."""

    state: ControllerState
    checkpoint: StoredCheckpoint | None
    branch: Branch
    problems: list[str]
    is_restored: bool

    @property
    def reason(self) -> str:
        if self.is_restored:
            return "rollback"
        return "start" if self.checkpoint is None else "takeover"

    @property
    def upto(self) -> LogEnd | None:
        """The last accepted journal record; None for all of them."""
        return LogEnd(self.state.epoch, self.state.sequence) if self.is_restored else None


def open_run(
    store: Store,
    *,
    run_uid: str,
    phases: Sequence[Phase],
    added_tokens: tuple[str, ...],
    holder: str,
    resume: ResumeAt | None = None,
) -> OpenedRun:
    """Take over a run, or start it, and fence every earlier controller.

    Raises:
        UserError: the storage belongs to another run, the phases or the added tokens differ from
            the checkpoint's, or the checkpoint to restore is lost.
        CorruptError: the journal is damaged.
    """
    _claim_storage(store, run_uid)
    start = _find_start(store, run_uid, phases, resume)
    state = start.state
    _check_phases(state, phases)
    if start.checkpoint is not None:
        _check_tokens(state, added_tokens)
    epoch = _claim_epoch(store, start, holder)
    # After the claim: all that an earlier controller acknowledged is in the journal now.
    before = write_ahead_log.recover_records(
        store, run_uid=run_uid, before_epoch=epoch, since=state.replay_from, upto=start.upto
    )
    book = JournaledLedger(
        Journal(
            store, run_uid, epoch, before.last_sequence + 1, branch=_branch_message(start.branch)
        ),
        resume_ledger(state.ledger, before.records, sequence=state.sequence),
    )
    book.write(_open_record(book.journal, before))
    return OpenedRun(
        epoch=epoch,
        book=book,
        cursor=state.cursor,
        figures=state.figures,
        checkpoint=start.checkpoint,
        next_version=read_epoch(store, epoch).first_number,
        problems=start.problems,
        is_new=start.checkpoint is None and not before.epoch and not start.is_restored,
        branch=start.branch,
        is_restored=start.is_restored,
    )


def _claim_epoch(store: Store, start: _StartPoint, holder: str) -> int:
    """Claim a new epoch behind the start's policy version."""
    policy = start.state.cursor.policy
    parent = None if policy is None else VersionId(*policy)
    return claim_epoch(store, holder=holder, parent=parent, reason=start.reason)


def _open_record(
    own: Journal, before: write_ahead_log.RecoveredJournal
) -> journal_pb2.JournalRecord:
    """First record of an epoch, which names the record that it follows."""
    opening = journal_pb2.JournalOpen(
        run_uid=own.owner,
        epoch=own.epoch,
        previous_epoch=before.epoch,
        previous_sequence=before.last_sequence,
        branch=own.branch,
    )
    return journal_pb2.JournalRecord(open=opening)


def _find_start(
    store: Store, run_uid: str, phases: Sequence[Phase], resume: ResumeAt | None
) -> _StartPoint:
    """Find the newest checkpoint of the run's branch, or the requested one."""
    opening = write_ahead_log.newest_open_record(store, run_uid=run_uid)
    present = Branch() if opening is None else Branch.from_proto(opening.branch)
    problems: list[str] = []
    places = manifest.list_checkpoints(store)
    if resume is not None and lineage.is_new_branch(resume, present):
        return _restore_start(store, run_uid, phases, resume)
    candidates = lineage.ancestors(places, present)
    found = manifest.first_intact(store, candidates, run=run_uid, problems=problems)
    state = initial_state(run_uid, phases) if found is None else read_state(store, found)
    return _StartPoint(state, found, present, problems, is_restored=False)


def _restore_start(
    store: Store, run_uid: str, phases: Sequence[Phase], resume: ResumeAt
) -> _StartPoint:
    """Find the requested checkpoint, and start a branch at it.

    Raises:
        UserError: it is lost, with all before it.
    """
    if resume.step is None:
        return _StartPoint(
            initial_state(run_uid, phases), None, Branch(resume.number), [], is_restored=True
        )
    problems: list[str] = []
    candidates = lineage.restore_candidates(manifest.list_checkpoints(store), resume)
    found = manifest.first_intact(store, candidates, run=run_uid, problems=problems)
    if found is None:
        raise UserError(
            Problem(
                reason=CorruptError.reason,
                what="; ".join(problems) or f"step {resume.step} is no longer in the store",
                where=f"checkpointing.resume: {store.url}",
                fix="name another checkpoint, or set resume: Latest",
            )
        )
    state = read_state(store, found)
    way = Branch(resume.number, (*state.way.path, found.manifest.checkpoint_id))
    return _StartPoint(state, found, way, problems, is_restored=True)


def _branch_message(branch: Branch) -> journal_pb2.JournalBranch | None:
    return branch.to_proto() if branch.number else None


def _claim_storage(store: Store, run_uid: str) -> None:
    """Refuse another run's storage, whose controller may still be alive.

    Raises:
        UserError: it belongs to another run.
    """
    with contextlib.suppress(ExistsError):
        store.create(OWNER, run_uid.encode())
    owner = store.get(OWNER).decode(errors="replace")
    if owner != run_uid:
        raise UserError(
            Problem(
                reason="StorageInUse",
                what=f"holds run {owner}, and this is run {run_uid}",
                where=f"storage.uri: {store.url}",
                fix="give each run a storage.uri of its own, or delete what is there",
            )
        )


def initial_state(run_uid: str, phases: Sequence[Phase]) -> ControllerState:
    """State of a run before its first step."""
    return ControllerState(
        run=run_uid,
        epoch=0,
        cursor=Cursor(phase=phases[0].name),
        figures=Figures(),
        ledger=LedgerState(),
        sequence=0,
        seeds={phase.name: phase.seed for phase in phases},
    )


def _check_phases(state: ControllerState, phases: Sequence[Phase]) -> None:
    seeds = {phase.name: phase.seed for phase in phases}
    if state.cursor.phase in seeds and all(
        seeds.get(name, seed) == seed for name, seed in state.seeds.items()
    ):
        return
    raise UserError(
        Problem(
            reason="PhasesChanged",
            what=f"the run was saved in phase {state.cursor.phase} with seeds {state.seeds}",
            where="phases",
            fix="restore the phases' names and seeds, or start a run with another storage.uri",
        )
    )


def _check_tokens(state: ControllerState, added_tokens: tuple[str, ...]) -> None:
    """Refuse other tokens than those whose rows of the embedding were trained.

    A model may have rows to spare, so that its shape does not tell.

    Raises:
        UserError: the tokens changed.
    """
    if state.added_tokens in {None, added_tokens}:
        return
    raise UserError(
        Problem(
            reason="TokensChanged",
            what=f"is {list(added_tokens)}, and the run was saved with"
            f" {list(state.added_tokens or ())}",
            where="model.addTokens",
            fix="restore the tokens in their order, or start a run with another storage.uri",
        )
    )
