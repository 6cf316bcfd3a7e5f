"""The feedback ledger: appends events, consents and erasures, and reads events back."""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from etude.common.blobs import Store
from etude.common.durable_log import (
    DurableLog,
    LogReader,
    LogSource,
    claim_log_epoch,
    is_log_fenced,
)
from etude.common.errors import CorruptError, FencedError
from etude.feedback.ledger import records
from etude.feedback.ledger.records import FIRST_CHAIN, ChainedRecord
from etude.feedback.ledger.sealing import SealedText, content_digest, seal, unseal
from etude.feedback.ledger.state import KnownEvent, LedgerState, UserConsent
from etude.feedback.ledger.user_keys import LedgerSecret, UserId, UserKeys
from etude.v1 import feedback_ledger_pb2 as pb

LEDGER = "feedback/ledger/"
GATHER_S = 0.1
"""Delay of an acknowledgement in which more events join its segment: ten objects a second."""
MAX_PAGE_BYTES = 8 << 20
MAX_PAGE_SEGMENTS = 100
"""What one page reads at most: its answer and its time are bounded, also where few events fit."""


@dataclass(slots=True)
class FeedbackLog(DurableLog):
    """Durable log of one writer of a ledger."""

    @property
    @override
    def prefix(self) -> str:
        return LEDGER

    @override
    def is_fenced(self) -> bool:
        return is_log_fenced(self.store, LEDGER, self.epoch)


class UserKey(NamedTuple):
    """Key of a user's next event."""

    user: UserId
    generation: int
    key: bytes


class NewEvent(NamedTuple):
    """A redacted event that may be stored."""

    digest: bytes
    """Of tenant, user, source and id."""
    kind: str
    original: bytes
    """As it was sent, to be known again; it is not stored."""
    redacted: bytes
    num_redactions: int


class StoredEvent(NamedTuple):
    """An event that was read back."""

    sequence: int
    tenant: str
    kind: str
    received_ms: int
    text: bytes
    """The redacted event in JSON."""


@dataclass(slots=True)
class EventPage:
    """Events of a part of the ledger."""

    end: int
    """Sequence of the last record that was looked at: the next page begins behind it."""
    events: list[StoredEvent] = field(default_factory=list)
    num_unreadable: int = 0
    """Events left out because they, or the keys of their users, are damaged."""


class Listing(NamedTuple):
    """Segments of the ledger, with all records up to one that was durable."""

    reader: LogReader
    durable: int


@dataclass(slots=True)
class FeedbackLedger:
    """One writer of a ledger. The appending methods run on the event loop, and never block."""

    log: FeedbackLog
    state: LedgerState
    secret: LedgerSecret
    keys: UserKeys
    chain: bytes
    """Of the newest record."""
    _listing: Listing | None = field(default=None, init=False)

    def check_alone(self) -> None:
        """Check that no other service writes the ledger: this one would not see its erasures.

        Raises:
            FencedError: one does.
            StoreError: the store did not answer.
        """
        if self.log.is_fenced():
            raise FencedError("another feedback service writes this ledger")

    async def user_key(self, user: UserId) -> UserKey:
        """The key of a user, made on first use.

        Raises:
            CorruptError: the key object is damaged.
            StoreError: the store of keys did not answer.
        """
        generation = self.state.generation(user)
        key = self.keys.cached_key(user, generation)
        if key is None:
            key = await asyncio.to_thread(self.keys.find_or_create, user, generation)
        return UserKey(user, generation, key)

    def find_event(self, digest: bytes) -> KnownEvent | None:
        """An event that was appended before."""
        return self.state.events.get(digest)

    def append_event(self, event: NewEvent, key: UserKey, *, now_ms: int) -> int:
        """Append an event, and return its sequence; wait until that is durable.

        Raises:
            ValueError: the event is in the ledger, or the user was erased since the key was read.
        """
        if event.digest in self.state.events or key.generation != self.state.generation(key.user):
            raise ValueError("the event is known, or its user was erased meanwhile")
        sealed = seal(event.redacted, key.key, label=event.digest)
        body = pb.FeedbackEventRecord(
            tenant=key.user.tenant,
            user_digest=key.user.digest,
            key_generation=key.generation,
            event_digest=event.digest,
            content_digest=content_digest(event.original, key.key),
            kind=event.kind,
            received_ms=now_ms,
            nonce=sealed.nonce,
            ciphertext=sealed.ciphertext,
            num_redactions=event.num_redactions,
        )
        return self._append(pb.FeedbackRecord(event=body))

    def append_consent(self, user: UserId, consent: UserConsent, *, now_ms: int) -> int:
        """Append a decision of a user, which takes effect immediately; return its sequence."""
        body = pb.FeedbackConsent(
            tenant=user.tenant,
            user_digest=user.digest,
            granted=consent.granted,
            policy_version=consent.policy_version,
            decided_ms=consent.decided_ms,
            received_ms=now_ms,
        )
        return self._append(pb.FeedbackRecord(consent=body))

    async def erase_user(self, user: UserId, *, now_ms: int) -> int:
        """Make a user's events unreadable for ever; return how many there were.

        Killed after the order is durable, the next writer of the ledger finishes it.

        Raises:
            StoreError: the store of keys did not answer; the order stands, and may be repeated.
        """
        num_events = self.state.num_events[user]
        generation = self.state.generation(user)
        body = pb.FeedbackErasure(
            tenant=user.tenant,
            user_digest=user.digest,
            key_generation=generation,
            received_ms=now_ms,
        )
        await self.wait_durable(self._append(pb.FeedbackRecord(erasure=body)))
        await asyncio.to_thread(self.keys.destroy, user, generation)
        return num_events

    async def wait_durable(self, sequence: int) -> None:
        """Wait until a record and all before it are durable."""
        await self.log.wait_durable(sequence)

    def read_page(self, *, tenant: str, after: int = 0, limit: int) -> EventPage:
        """Read a tenant's usable events behind a sequence, in order; blocks.

        Events of users who do not consent now, or who were erased, are left out; so are those that
        do not decrypt. A page ends at its limit, at MAX_PAGE_BYTES or at MAX_PAGE_SEGMENTS.

        Raises:
            CorruptError: a segment is damaged.
            StoreError: the store did not answer.
        """
        listing = self._list_segments(after)
        page, num_bytes = EventPage(after), 0
        segments = listing.reader.accepted_segments(since=after + 1)
        for segment in itertools.islice(segments, MAX_PAGE_SEGMENTS):
            for framed in segment.records:
                if framed.sequence > listing.durable:
                    return page
                if len(page.events) >= limit or num_bytes >= MAX_PAGE_BYTES:
                    return page
                page.end = framed.sequence
                record = records.parse_record(framed, segment.where)
                event = self._read_usable(record, tenant, page)
                if event is not None:
                    page.events.append(event)
                    num_bytes += len(event.text)
        return page

    def _list_segments(self, after: int) -> Listing:
        """The segments that were listed last, if they hold a record behind a sequence."""
        listing = self._listing
        if listing is None or after >= listing.durable:
            # In this order: what is durable now is in the listing.
            durable = self.log.durable_sequence
            source = ledger_source(self.log.store, self.log.owner)
            listing = self._listing = Listing(LogReader.read_listing(source), durable)
        return listing

    def _read_usable(
        self, record: ChainedRecord, tenant: str, page: EventPage
    ) -> StoredEvent | None:
        event = record.body.event
        if not record.body.HasField("event") or event.tenant != tenant:
            return None
        if not self.state.is_usable(event):
            return None
        try:
            return self._read_event(record.sequence, event)
        except CorruptError:
            page.num_unreadable += 1
            return None

    def _read_event(self, sequence: int, event: pb.FeedbackEventRecord) -> StoredEvent | None:
        text = self.read_text(event)
        if text is None:
            return None
        return StoredEvent(sequence, event.tenant, event.kind, event.received_ms, text)

    def read_text(self, event: pb.FeedbackEventRecord) -> bytes | None:
        """The redacted event in JSON, None if its user was erased since; blocks.

        Raises:
            CorruptError: the event or the key of its user is damaged.
            StoreError: the store of keys did not answer.
        """
        return unseal_event(event, self.state, self.keys)

    def _append(self, body: pb.FeedbackRecord) -> int:
        sequence = self.log.next_sequence
        frame, self.chain = records.encode_record(sequence, body, previous=self.chain)
        self.log.enqueue(frame)
        self.state.apply(ChainedRecord(sequence, self.chain, body))
        return sequence


def open_ledger(
    store: Store, key_store: Store, secret: LedgerSecret, *, uid: str, holder: str
) -> FeedbackLedger:
    """Open a ledger for writing, and fence every earlier writer; blocks.

    Args:
        store: of the ledger.
        key_store: of the users' keys; without versions of objects and without backups.
        secret: of the ledger.
        uid: name of the ledger; records of another are refused.
        holder: name of this process, for people.

    Raises:
        CorruptError: a record is damaged, missing, or of another ledger.
        FencedError: other writers kept winning.
        StoreError: a store did not answer.
        UserError: the secret is another than that of the stored keys.
    """
    keys = UserKeys(key_store, secret)
    # Before the claim: who cannot read the ledger does not fence the one who can.
    keys.check_secret()
    epoch = claim_log_epoch(store, LEDGER, holder=holder)
    # After the claim: all that an earlier writer acknowledged is in the log now.
    reader = LogReader.read_listing(ledger_source(store, uid))
    state, chain, end = LedgerState(), FIRST_CHAIN, 0
    for segment in reader.accepted_segments(before_epoch=epoch):
        end = segment.end
        for framed in segment.records:
            chain = records.check_chain(framed, segment.where, previous=chain)
            state.apply(records.parse_record(framed, segment.where))
    for user, num_erasures in state.erasures.items():
        keys.destroy(user, num_erasures - 1)  # a writer may have died before it did
    ledger = FeedbackLedger(
        FeedbackLog(store, uid, epoch, end + 1, gather_s=GATHER_S), state, secret, keys, chain
    )
    opening = pb.FeedbackOpen(
        ledger_uid=uid,
        epoch=epoch,
        previous_epoch=reader.newest_epoch(before=epoch),
        previous_sequence=end,
    )
    ledger._append(pb.FeedbackRecord(open=opening))
    return ledger


def unseal_event(event: pb.FeedbackEventRecord, state: LedgerState, keys: UserKeys) -> bytes | None:
    """The redacted event in JSON, None if its user was erased since; blocks.

    Raises:
        CorruptError: the event or the key of its user is damaged.
        StoreError: the store of keys did not answer.
    """
    user = UserId(event.tenant, event.user_digest)
    if event.key_generation < state.generation(user):
        return None
    key = keys.find(user, event.key_generation)
    if key is None:
        return None
    return unseal(SealedText(event.nonce, event.ciphertext), key, label=event.event_digest)


def ledger_source(store: Store, uid: str) -> LogSource:
    """Place and format of a ledger."""
    return LogSource(store, LEDGER, uid, records.parse_opening)
