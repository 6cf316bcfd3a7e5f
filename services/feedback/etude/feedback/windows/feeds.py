"""Feeds of a window builder: what the ledger and the turn log got since the last time."""

import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.blobs import MissingError, Store
from etude.common.durable_log import LogReader
from etude.common.errors import CorruptError, InvalidFieldError
from etude.common.feedback.events import AnyEvent, parse_event
from etude.common.turns import turn_log
from etude.feedback import metrics
from etude.feedback.ledger import records
from etude.feedback.ledger.ledger import FeedbackLedger, ledger_source
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.history import RolloutEvent, reduce_event
from etude.v1 import feedback_ledger_pb2, turns_pb2

log = logging.getLogger(__name__)

_LONGEST_DELAY_S = 600.0
_TURN_KEY = re.compile(re.escape(turn_log.PREFIX) + r"[^/]+/[0-9]{12}\.zst")


class EventItem(NamedTuple):
    """An event that was appended to the ledger."""

    user: UserId
    rollout: str
    """As `turn_log.identify_rollout` names it."""
    event: RolloutEvent | None
    """None for a kind that no signal reads."""
    sequence: int
    received_ms: int
    whole: AnyEvent
    """As it was sent, redacted."""


class ConsentItem(NamedTuple):
    """A decision of a user that was appended to the ledger."""

    user: UserId
    granted: bool
    policy_version: str
    sequence: int
    decided_ms: int
    received_ms: int


class ErasureItem(NamedTuple):
    """An erasure that was appended to the ledger."""

    user: UserId
    sequence: int
    received_ms: int


LedgerItem = EventItem | ConsentItem | ErasureItem


@dataclass(slots=True)
class LedgerFeed:
    """Reads the durable records of a ledger once, in order; blocks."""

    ledger: FeedbackLedger
    position: int = 0
    """Sequence of the newest record that was read."""
    _key: str = ""
    """Key of the newest segment that was read."""

    def read(self) -> Iterator[LedgerItem]:
        """Read what became durable since the last call.

        Raises:
            CorruptError: a segment is damaged.
            StoreError: a store did not answer; what was not read comes with the next call.
        """
        ledger = self.ledger
        # In this order: what is durable now is in the listing.
        durable = ledger.log.durable_sequence
        source = ledger_source(ledger.log.store, ledger.log.owner)
        reader = LogReader.read_listing(source, after=self._key)
        epoch = ledger.log.epoch + 1
        for segment in reader.accepted_segments(before_epoch=epoch, since=self.position + 1):
            if segment.end > durable:
                return
            for framed in segment.records:
                record = records.parse_record(framed, segment.where)
                yield from self._items(record.sequence, record.body)
                self.position = record.sequence
            self._key = segment.where.removeprefix(f"{ledger.log.store.url}/")

    def _items(
        self, sequence: int, body: feedback_ledger_pb2.FeedbackRecord
    ) -> Iterator[LedgerItem]:
        match body.WhichOneof("body"):
            case "event":
                yield from self._read_event(sequence, body.event)
            case "consent":
                consent = body.consent
                yield ConsentItem(
                    user=UserId(consent.tenant, consent.user_digest),
                    granted=consent.granted,
                    policy_version=consent.policy_version,
                    sequence=sequence,
                    decided_ms=consent.decided_ms,
                    received_ms=consent.received_ms,
                )
            case "erasure":
                user = UserId(body.erasure.tenant, body.erasure.user_digest)
                yield ErasureItem(user, sequence, body.erasure.received_ms)
            case _:  # opens an epoch
                pass

    def _read_event(
        self, sequence: int, body: feedback_ledger_pb2.FeedbackEventRecord
    ) -> Iterator[EventItem]:
        user = UserId(body.tenant, body.user_digest)
        try:
            text = self.ledger.read_text(body)
            event = None if text is None else parse_event(text)
        except (CorruptError, InvalidFieldError):
            metrics.UNREADABLE.inc()
            return
        if event is None:  # erased since
            return
        data = event.data
        yield EventItem(
            user=user,
            rollout=turn_log.identify_rollout(data.tenant, data.user, data.rollout),
            event=reduce_event(event.kind, body.received_ms, data.payload, sequence=sequence),
            sequence=sequence,
            received_ms=body.received_ms,
            whole=event,
        )


class StoredTurns(NamedTuple):
    """One object of the turn log."""

    key: str
    stored_ms: int
    """Time by the clock of the store; 0 where it does not tell."""
    segment: turns_pb2.TurnSegment


@dataclass(slots=True)
class _WriterPlace:
    """Place up to which the objects of one writer were read."""

    key: str = ""
    """Of the newest object that was read."""
    changed_s: float = -math.inf
    """Time of that object."""
    listed_s: float = -math.inf


@dataclass(slots=True)
class TurnFeed:
    """Reads the durable turns of a route once; blocks.

    A damaged object is left out and reported: the rollouts that need its turns are incomplete. So
    is one that was removed before it was read.
    """

    store: Store
    horizon_s: float = 0.0
    """Time in which the signals of a rollout come. A writer that was silent for a sixth of it, or
    for ten minutes, is listed as seldom, and read as late: most are processes that ended, and each
    costs a request."""
    clock_s: Callable[[], float] = time.time
    """To compare with the store's."""
    _writers: dict[str, _WriterPlace] = field(default_factory=dict)

    def read(self) -> Iterator[StoredTurns]:
        """Read the objects that were created since the last call.

        Raises:
            StoreError: the store did not answer; what was not read comes with the next call.
        """
        delay_s = min(_LONGEST_DELAY_S, self.horizon_s / 6)
        names = self.store.list_folders(turn_log.PREFIX)
        # A writer without objects left begins anew: what it writes is new.
        self._writers = {name: self._writers.get(name) or _WriterPlace() for name in names}
        for name, place in self._writers.items():
            now_s = self.clock_s()
            is_active = now_s - place.changed_s < delay_s
            # Also if the clock was set back.
            if is_active or not 0 <= now_s - place.listed_s < delay_s:
                yield from self._read_writer(name, place)
                place.listed_s = now_s

    def _read_writer(self, name: str, place: _WriterPlace) -> Iterator[StoredTurns]:
        for info in self.store.list(f"{turn_log.PREFIX}{name}/", after=place.key):
            if not _TURN_KEY.fullmatch(info.key):
                continue
            segment: turns_pb2.TurnSegment | None = None
            try:
                where = f"{self.store.url}/{info.key}"
                segment = turn_log.decode_segment(self.store.get(info.key), where=where)
            except (CorruptError, MissingError) as error:
                log.warning("turns are left out: %s", error)
            place.key, place.changed_s = info.key, info.modified_s or self.clock_s()
            if segment is not None:
                yield StoredTurns(info.key, int(1_000 * info.modified_s), segment)
