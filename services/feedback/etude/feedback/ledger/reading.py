"""Reader of a ledger, which writes nothing: decisions of its users, and their events."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from etude.common.blobs import Store
from etude.common.durable_log import LogReader, LogSource
from etude.common.errors import CorruptError, InvalidFieldError
from etude.common.feedback.events import AnyEvent, parse_event
from etude.feedback.ledger import records
from etude.feedback.ledger.ledger import ledger_source, unseal_event
from etude.feedback.ledger.records import ChainedRecord
from etude.feedback.ledger.state import LedgerState
from etude.feedback.ledger.user_keys import LedgerSecret, UserId, UserKeys


class UserEvent(NamedTuple):
    """A readable event, and its user as the ledger knows one."""

    user: UserId
    event: AnyEvent


@dataclass(slots=True)
class LedgerReader:
    """Reads what was durable when it was opened; blocks."""

    source: LogSource
    keys: UserKeys
    state: LedgerState = field(default_factory=LedgerState)
    erased_ms: dict[UserId, int] = field(default_factory=dict)
    """Time of each user's newest erasure."""
    num_unreadable: int = 0
    """Events left out because they, or the keys of their users, are damaged."""

    @classmethod
    def open(cls, store: Store, key_store: Store, secret: LedgerSecret, *, uid: str) -> Self:
        """Read the decisions of all users.

        Raises:
            CorruptError: the ledger is damaged, or has another name.
            StoreError: the store did not answer.
        """
        reader = cls(ledger_source(store, uid), UserKeys(key_store, secret))
        for record in reader._read_records():
            reader.state.apply(record)
            if record.body.HasField("erasure"):
                erasure = record.body.erasure
                user = UserId(erasure.tenant, erasure.user_digest)
                reader.erased_ms[user] = erasure.received_ms
        return reader

    @property
    def secret(self) -> LedgerSecret:
        return self.keys.secret

    def read_events(self, tenant: str, kinds: Collection[str]) -> Iterator[UserEvent]:
        """Read a tenant's usable events of some kinds, in the order of the ledger.

        Events of users who do not consent now, or who were erased, are left out.

        Raises:
            CorruptError: a segment is damaged.
            StoreError: a store did not answer.
        """
        for record in self._read_records():
            sealed = record.body.event
            if not record.body.HasField("event") or sealed.tenant != tenant:
                continue
            if sealed.kind not in kinds or not self.state.is_usable(sealed):
                continue
            try:
                text = unseal_event(sealed, self.state, self.keys)
                event = None if text is None else parse_event(text)
            except (CorruptError, InvalidFieldError):
                self.num_unreadable += 1
                continue
            if event is not None:  # else the user was erased since
                yield UserEvent(UserId(tenant, sealed.user_digest), event)

    def count_events(self, user: UserId) -> int:
        """Count the events of a user, those that can no longer be read included.

        Raises:
            CorruptError: a segment is damaged.
            StoreError: the store did not answer.
        """
        bodies = (each.body for each in self._read_records() if each.body.HasField("event"))
        return sum(UserId(body.event.tenant, body.event.user_digest) == user for body in bodies)

    def _read_records(self) -> Iterator[ChainedRecord]:
        for segment in LogReader.read_listing(self.source).accepted_segments():
            for framed in segment.records:
                yield records.parse_record(framed, segment.where)
