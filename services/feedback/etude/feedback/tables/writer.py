"""Writer of the tables: follows ledger, turn log and windows, and lets users who left disappear.

    rows of users who left go  ->  new rows are appended  ->  outcomes of open days are measured

In this order: the stored rows say from where to read on, and killed anywhere in between, the next
writer finds an erasure behind them again. All tables can be deleted: they are written again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.common.blobs import Store
from etude.common.feedback import windows
from etude.feedback.ledger.ledger import FeedbackLedger
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.tables import rows, schema
from etude.feedback.tables.outcomes import OutcomeDays
from etude.feedback.tables.parts import TableParts
from etude.feedback.tables.schema import Row
from etude.feedback.windows.feeds import (
    ConsentItem,
    ErasureItem,
    EventItem,
    LedgerFeed,
    LedgerItem,
    TurnFeed,
)
from etude.feedback.windows.settings import WindowRules
from etude.feedback.windows.waiting import ERASED, NO_CONSENT, WaitingRollouts

BATCH_ITEMS = 8_192
_LEFT_OUT = frozenset({ERASED, NO_CONSENT, "OnlySideTurns"})
"""Masks of rollouts that say nothing, or may not be used; others cannot be trained, and count."""


@dataclass(slots=True)
class _Batch:
    """New rows, and users whose old rows go."""

    events: list[tuple[UserId, Row]] = field(default_factory=list)
    consents: list[tuple[UserId, Row]] = field(default_factory=list)
    erased: set[UserId] = field(default_factory=set)
    revoked: set[UserId] = field(default_factory=set)
    num_items: int = 0


@dataclass(slots=True)
class _StoredTables:
    """The tables as they are stored, and what was read for them."""

    ledger: FeedbackLedger
    rules: WindowRules
    waiting: WaitingRollouts = field(init=False)
    feed: LedgerFeed = field(init=False)
    turns: TurnFeed = field(init=False)
    events: TableParts = field(init=False)
    consents: TableParts = field(init=False)
    windows: TableParts = field(init=False)
    window_rollouts: TableParts = field(init=False)
    outcomes: OutcomeDays = field(init=False)

    def __post_init__(self) -> None:
        store = self.ledger.log.store
        self.waiting = WaitingRollouts(self.ledger.secret)
        self.feed = LedgerFeed(self.ledger)
        self.turns = TurnFeed(store, self.rules.horizon_s)
        self.events = TableParts(store, "events", schema.EVENTS)
        self.consents = TableParts(store, "consents", schema.CONSENTS)
        self.windows = TableParts(store, "windows", schema.WINDOWS)
        self.window_rollouts = TableParts(store, "window_rollouts", schema.WINDOW_ROLLOUTS)
        self.outcomes = OutcomeDays(store, self.rules)


@dataclass(slots=True)
class TableWriter:
    """Writes the tables of one route; blocks, and belongs to one thread."""

    ledger: FeedbackLedger
    rules: WindowRules
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    is_stopping: Callable[[], bool] = lambda: False
    """Asked between batches: the rest is left to the next service."""
    _tables: _StoredTables | None = None

    def run_pass(self) -> None:
        """Bring the tables up to date.

        Raises:
            CorruptError: a part, a window or the ledger is damaged.
            FencedError: another service writes the ledger.
            StoreError: a store did not answer; the next pass starts over.
        """
        tables = self._tables or _StoredTables(self.ledger, self.rules)
        self._tables = None
        self._read_ledger(tables)
        if self.is_stopping():
            return
        for stored in tables.turns.read():
            tables.waiting.add_turns(stored)
        self.ledger.check_alone()
        _append_windows(self.ledger.log.store, tables)
        usable = (
            each
            for each in tables.waiting.histories.values()
            if tables.waiting.find_mask(each) not in _LEFT_OUT
        )
        tables.waiting.forget(tables.outcomes.write(usable, now_ms=self.clock_ms()))
        # Only now: a pass that failed may have read what it did not write.
        self._tables = tables

    def _read_ledger(self, tables: _StoredTables) -> None:
        batch = _Batch()
        for item in tables.feed.read():
            tables.waiting.apply(item)
            _add_item(batch, item, tables)
            if batch.num_items >= BATCH_ITEMS:
                self._write(batch, tables)
                batch = _Batch()
                if self.is_stopping():
                    return
        self._write(batch, tables)

    def _write(self, batch: _Batch, tables: _StoredTables) -> None:
        self.ledger.check_alone()
        if batch.erased:
            tables.consents.drop_users(batch.erased)
            tables.window_rollouts.drop_users(batch.erased)
        if left := batch.erased | batch.revoked:
            tables.events.drop_users(left)
            tables.outcomes.drop_users(left)
        consents, erasures = self.ledger.state.consents, tables.waiting.erasures
        tables.consents.append(
            [
                row
                for user, row in batch.consents
                if user not in erasures or row["sequence"] > erasures[user].sequence
            ]
        )
        tables.events.append(
            [row for user, row in batch.events if user in consents and consents[user].granted]
        )


def _add_item(batch: _Batch, item: LedgerItem, tables: _StoredTables) -> None:
    """Add an item, unless the stored rows are behind it already."""
    is_new = item.sequence > tables.events.position
    # The rows behind the last one of consents may have been an erased user's: they come again.
    may_return = item.sequence > min(tables.events.position, tables.consents.position)
    match item:
        case EventItem() if is_new:
            batch.events.append((item.user, rows.event_row(item)))
        case ConsentItem() if item.sequence > tables.consents.position:
            batch.consents.append((item.user, rows.consent_row(item)))
        case _:
            pass
    match item:
        case ErasureItem() if may_return:
            batch.erased.add(item.user)
        case ConsentItem(granted=False) if is_new:
            batch.revoked.add(item.user)
        case _:
            pass
    batch.num_items += 1


def _append_windows(store: Store, tables: _StoredTables) -> None:
    after = max(0, min(tables.windows.position, tables.window_rollouts.position))
    for number in windows.list_windows(store, after=after):
        manifest = windows.read_window(store, number)
        erased = {
            user
            for user, erasure in tables.waiting.erasures.items()
            if erasure.sequence > manifest.last_sequence
        }
        tables.window_rollouts.append([*rows.window_rollout_rows(manifest, erased=erased)])
        tables.windows.append([rows.window_row(manifest)])
