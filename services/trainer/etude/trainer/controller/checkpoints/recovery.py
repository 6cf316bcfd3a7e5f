"""Taking over a run: a new epoch, the newest verified checkpoint, the journal behind it."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etude.common import checkpoints
from etude.common.api.phases import Phase
from etude.common.blobs import ExistsError, Store
from etude.common.checkpoints import StoredCheckpoint
from etude.common.errors import CorruptError, Problem, UserError
from etude.common.files import ResumeAt
from etude.common.weights import VersionId, claim_epoch, read_epoch
from etude.trainer.controller.checkpoints import lineage
from etude.trainer.controller.checkpoints.lineage import Branch
from etude.trainer.controller.checkpoints.state import ControllerState, Cursor, Figures, read_state
from etude.trainer.controller.journal import write_ahead_log
from etude.trainer.controller.journal.ledger import Ledger, LedgerState, resumed
from etude.trainer.controller.journal.write_ahead_log import End, Journal
from etude.v1 import journal_pb2

OWNER = "owner"
"""Object that names the run whose storage this is. Created once, before anybody is fenced."""


@dataclass(slots=True)
class Book:
    """The journal and the account it makes up: one is never written without the other."""

    journal: Journal
    ledger: Ledger

    def write(self, record: journal_pb2.JournalRecord) -> int:
        """Log a record and take it into account; returns its sequence."""
        sequence = self.journal.append(record)
        self.ledger.apply(record)
        return sequence


class Opened(NamedTuple):
    """A run that this process now owns."""

    epoch: int
    book: Book
    cursor: Cursor
    figures: Figures
    checkpoint: StoredCheckpoint | None
    """What the learner must restore."""
    next_version: int
    """Smallest number that may be published."""
    problems: list[str]
    """Checkpoints that were passed over because they are damaged."""
    is_new: bool
    """Nothing was recorded before."""
    branch: Branch
    """The way that it has gone, from here on."""
    is_put_back: bool
    """Whether it left what was recorded after the checkpoint just now."""


class _Start(NamedTuple):
    """Where a controller begins."""

    state: ControllerState
    checkpoint: StoredCheckpoint | None
    branch: Branch
    problems: list[str]
    is_put_back: bool

    @property
    def reason(self) -> str:
        """Why it opens an epoch."""
        if self.is_put_back:
            return "rollback"
        return "start" if self.checkpoint is None else "takeover"

    @property
    def upto(self) -> End | None:
        """The last journal record that counts; None for all of them."""
        return End(self.state.epoch, self.state.sequence) if self.is_put_back else None


def open_run(
    store: Store,
    *,
    run_uid: str,
    phases: Sequence[Phase],
    holder: str,
    resume: ResumeAt | None = None,
) -> Opened:
    """Take over a run, or begin it. From here on every earlier controller is fenced.

    Args:
        store: the run's.
        run_uid: its UID.
        phases: as its spec has them.
        holder: who takes over, for people.
        resume: what it shall be put back to, unless it was already.

    Raises:
        UserError: the storage belongs to another run, the phases are not those that the
            checkpoint was made with, or the checkpoint to be put back to is lost.
        CorruptError: the journal is damaged.
    """
    _claim_storage(store, run_uid)
    start = _start(store, run_uid, phases, resume)
    state = start.state
    _check_phases(state, phases)
    epoch = _claim(store, start, holder)
    # Only now: what an earlier controller acknowledged before the claim is in the journal.
    before = write_ahead_log.recover(
        store, run_uid=run_uid, before_epoch=epoch, since=state.replay_from, upto=start.upto
    )
    book = Book(
        Journal(store, run_uid, epoch, before.last_sequence + 1, branch=_said(start.branch)),
        resumed(state.ledger, before.records, sequence=state.sequence),
    )
    book.write(_opening(book.journal, before))
    return Opened(
        epoch=epoch,
        book=book,
        cursor=state.cursor,
        figures=state.figures,
        checkpoint=start.checkpoint,
        next_version=read_epoch(store, epoch).first_number,
        problems=start.problems,
        is_new=start.checkpoint is None and not before.epoch and not start.is_put_back,
        branch=start.branch,
        is_put_back=start.is_put_back,
    )


def _claim(store: Store, start: _Start, holder: str) -> int:
    """A new epoch, which goes on from the policy that the start has."""
    policy = start.state.cursor.policy
    parent = None if policy is None else VersionId(*policy)
    return claim_epoch(store, holder=holder, parent=parent, reason=start.reason)


def _opening(own: Journal, before: write_ahead_log.Recovered) -> journal_pb2.JournalRecord:
    """The first record of an epoch: after which record of which epoch it goes on."""
    opening = journal_pb2.JournalOpen(
        run_uid=own.run_uid,
        epoch=own.epoch,
        previous_epoch=before.epoch,
        previous_sequence=before.last_sequence,
        branch=own.branch,
    )
    return journal_pb2.JournalRecord(open=opening)


def _start(store: Store, run_uid: str, phases: Sequence[Phase], resume: ResumeAt | None) -> _Start:
    """The newest checkpoint of the way that the run has gone, or the one that is asked for."""
    opening = write_ahead_log.newest_opening(store, run_uid=run_uid)
    present = Branch() if opening is None else Branch.from_proto(opening.branch)
    problems: list[str] = []
    places = checkpoints.places(store)
    if resume is not None and lineage.is_new(resume, present):
        return _put_back(store, run_uid, phases, resume)
    candidates = lineage.past(places, present)
    found = checkpoints.first_verified(store, candidates, run=run_uid, problems=problems)
    state = _first(run_uid, phases) if found is None else read_state(store, found)
    return _Start(state, found, present, problems, is_put_back=False)


def _put_back(store: Store, run_uid: str, phases: Sequence[Phase], resume: ResumeAt) -> _Start:
    """The checkpoint that is asked for, and the branch that begins at it.

    Raises:
        UserError: it is lost, and so is all before it.
    """
    if resume.step is None:
        return _Start(_first(run_uid, phases), None, Branch(resume.number), [], is_put_back=True)
    problems: list[str] = []
    candidates = lineage.targets(checkpoints.places(store), resume)
    found = checkpoints.first_verified(store, candidates, run=run_uid, problems=problems)
    if found is None:
        raise UserError(
            Problem(
                reason=CorruptError.reason,
                what="; ".join(problems) or f"step {resume.step} is not in the store any more",
                where=f"checkpointing.resume: {store.url}",
                fix="name another checkpoint, or set resume: Latest",
            )
        )
    state = read_state(store, found)
    way = Branch(resume.number, (*state.way.path, found.manifest.place))
    return _Start(state, found, way, problems, is_put_back=True)


def _said(branch: Branch) -> journal_pb2.JournalBranch | None:
    return branch.to_proto() if branch.number else None


def _claim_storage(store: Store, run_uid: str) -> None:
    """Refuse another run's storage while its controller still may live.

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


def _first(run_uid: str, phases: Sequence[Phase]) -> ControllerState:
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
