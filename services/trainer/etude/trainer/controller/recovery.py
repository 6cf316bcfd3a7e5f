"""Taking over a run: a new epoch, the newest verified checkpoint, the journal behind it."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etude.common import checkpoints
from etude.common.api.phases import Phase
from etude.common.blobs import ExistsError, Store
from etude.common.checkpoints import StoredCheckpoint
from etude.common.errors import Problem, UserError
from etude.common.weights import VersionId, claim_epoch, read_epoch
from etude.trainer.controller import journal
from etude.trainer.controller.journal import Journal
from etude.trainer.controller.ledger import Ledger, LedgerState, resumed
from etude.trainer.controller.state import ControllerState, Cursor, Figures, read_state
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


def open_run(store: Store, *, run_uid: str, phases: Sequence[Phase], holder: str) -> Opened:
    """Take over a run, or begin it. From here on every earlier controller is fenced.

    Raises:
        UserError: the storage belongs to another run, or the phases are not those that the
            checkpoint was made with.
        CorruptError: the journal is damaged.
    """
    _claim_storage(store, run_uid)
    problems: list[str] = []
    found = checkpoints.newest_verified(store, run=run_uid, problems=problems)
    state = _first(run_uid, phases) if found is None else read_state(store, found)
    _check_phases(state, phases)
    policy = state.cursor.policy
    epoch = claim_epoch(
        store,
        holder=holder,
        parent=None if policy is None else VersionId(*policy),
        reason="start" if found is None else "takeover",
    )
    # Only now: what an earlier controller acknowledged before the claim is in the journal.
    before = journal.recover(store, run_uid=run_uid, before_epoch=epoch, since=state.replay_from)
    book = Book(
        Journal(store, run_uid, epoch, before.last_sequence + 1),
        resumed(state.ledger, before.records, sequence=state.sequence),
    )
    opening = journal_pb2.JournalOpen(
        run_uid=run_uid,
        epoch=epoch,
        previous_epoch=before.epoch,
        previous_sequence=before.last_sequence,
    )
    book.write(journal_pb2.JournalRecord(open=opening))
    return Opened(
        epoch=epoch,
        book=book,
        cursor=state.cursor,
        figures=state.figures,
        checkpoint=found,
        next_version=read_epoch(store, epoch).first_number,
        problems=problems,
        is_new=found is None and not before.epoch,
    )


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
