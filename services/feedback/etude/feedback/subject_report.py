"""Report on one user: all that the stores of a route have of the user, and who trained on it.

It reads what is stored and asks no service, so that it says the same before, during and after an
erasure that is killed and repeated. Windows keep pseudonyms, and checkpoints name their windows.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from etude.common.blobs import MissingError, Store
from etude.common.checkpoints import manifest as checkpoints
from etude.common.checkpoints.manifest import CONTROLLER, CheckpointId
from etude.common.errors import CorruptError
from etude.common.feedback import windows
from etude.feedback.ledger.reading import LedgerReader
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.sessions.task_records import list_tasks
from etude.feedback.turn_keys import find_user
from etude.feedback.windows.feeds import TurnFeed
from etude.v1 import turns_pb2

_WINDOW_TASK = re.compile(rf"/{windows.WINDOWS}([0-9]{{12}})\.json#[0-9]+/[0-9]+$")
"""End of the name under which a run admits a part of a window."""


class SeenCheckpoint(NamedTuple):
    """A checkpoint whose run had started to train windows with rollouts of the user."""

    prefix: str
    run_uid: str
    version: str
    """The newest one that was published from its weights."""
    windows: tuple[int, ...]


@dataclass(slots=True)
class SubjectReport:
    """Counts of what is stored of a user."""

    user: UserId
    erasures: int = 0
    remaining_keys: int = 0
    """Keys of before the newest erasure: the feedback service deletes them as it starts."""
    events: int = 0
    readable_events: int = 0
    turns: int = 0
    readable_turns: int = 0
    unencrypted_turns: int = 0
    """Of the readable ones: no erasure reaches them."""
    rollouts: set[str] = field(default_factory=set)
    """Of recorded turns, and those that windows trained."""
    trained: Counter[int] = field(default_factory=Counter)
    """Rollouts, by window."""
    excluded: int = 0
    """Rollouts that a window left out."""
    stored_rollouts: int = 0
    """Objects with tokens, which the feedback service deletes after an erasure."""
    tasks: list[str] = field(default_factory=list)
    """Tasks that were made of the user's sessions."""
    checkpoints: list[SeenCheckpoint] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Checkpoints and windows that cannot be read, and may have seen the user."""

    @property
    def waiting(self) -> int:
        """Rollouts that are in no window."""
        return len(self.rollouts) - self.trained.total() - self.excluded


def report_subject(
    ledger: LedgerReader, user: UserId, run_stores: Sequence[Store]
) -> SubjectReport:
    """Read all that is stored of a user; blocks, as long as the turn log is large.

    Args:
        ledger: of the route.
        user: to report on.
        run_stores: of the runs whose checkpoints are looked at.

    Raises:
        CorruptError: the ledger is damaged.
        StoreError: a store did not answer.
    """
    report = SubjectReport(user, erasures=ledger.state.generation(user))
    store = ledger.source.store
    report.remaining_keys = _count_keys(ledger, user)
    report.events = ledger.count_events(user)
    report.readable_events = ledger.state.num_events[user]
    for stored in TurnFeed(store).read():
        for record in stored.segment.turns:
            if find_user(record, ledger.secret) == user:
                _add_turn(report, record)
    _read_windows(report, store)
    report.stored_rollouts = sum(1 for _ in store.list(windows.rollout_prefix(*user)))
    report.tasks = [task.task_id for task in list_tasks(store, user)]
    for each in run_stores:
        _read_checkpoints(report, each)
    return report


def _count_keys(ledger: LedgerReader, user: UserId) -> int:
    found = 0
    for generation in range(ledger.state.generation(user)):
        try:
            found += ledger.keys.find(user, generation) is not None
        except CorruptError:
            found += 1
    return found


def _add_turn(report: SubjectReport, record: turns_pb2.TurnRecord) -> None:
    report.turns += 1
    report.rollouts.add(record.rollout_id)
    is_sealed = record.HasField("sealed")
    if not is_sealed or record.sealed.key_generation >= report.erasures:
        report.readable_turns += 1
        report.unencrypted_turns += not is_sealed


def _read_windows(report: SubjectReport, store: Store) -> None:
    for number in windows.list_windows(store):
        try:
            manifest = windows.read_window(store, number)
        except (CorruptError, MissingError) as error:
            report.damaged.append(str(error))
            continue
        for each in manifest.rollouts:
            if UserId(each.tenant, each.user) == report.user:
                report.trained[number] += 1
                report.rollouts.add(each.rollout)
        report.excluded += sum(each.rollout in report.rollouts for each in manifest.exclusions)


class _Ledger(BaseModel):
    consumed: list[str]


class _State(BaseModel):
    """The part of a controller's state that names what its run admitted."""

    ledger: _Ledger


def _read_checkpoints(report: SubjectReport, store: Store) -> None:
    for place in checkpoints.list_checkpoints(store):
        try:
            seen = _read_checkpoint(report, store, place)
        except (CorruptError, MissingError, ValidationError) as error:
            report.damaged.append(f"{store.url}/{place.prefix}: {error}".partition("\n")[0])
        else:
            if seen.windows:
                report.checkpoints.append(seen)


def _read_checkpoint(report: SubjectReport, store: Store, place: CheckpointId) -> SeenCheckpoint:
    found = checkpoints.read_checkpoint(store, place)
    key = f"{found.prefix}{found.manifest.state_folder}{CONTROLLER}"
    state = _State.model_validate_json(store.get(key))
    named = (_WINDOW_TASK.search(name) for name in state.ledger.consumed)
    numbers = {int(match[1]) for match in named if match}
    version = f"{found.manifest.epoch}.{found.manifest.policy_version}"
    return SeenCheckpoint(
        f"{store.url}/{found.prefix}",
        found.manifest.run,
        version,
        tuple(sorted(numbers & report.trained.keys())),
    )
