"""Offline audit of a ledger: its chain, its events, and the consents and erasures before each."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.blobs import Store
from etude.common.durable_log import LogReader
from etude.common.errors import CorruptError
from etude.feedback.ledger import records
from etude.feedback.ledger.ledger import ledger_source
from etude.feedback.ledger.user_keys import UserId
from etude.v1 import feedback_ledger_pb2 as pb


class LedgerFinding(NamedTuple):
    """One broken invariant."""

    invariant: str
    """log: the log itself; chain; unique: events count once; consent; erasure."""
    what: str


@dataclass(slots=True)
class LedgerAudit:
    """Counts of a ledger, and its broken invariants."""

    num_records: Counter[str] = field(default_factory=Counter)
    """By the field of FeedbackRecord."""
    head: bytes = records.FIRST_CHAIN
    """Chain of the newest record: published elsewhere, it proves later that nothing was changed."""
    findings: list[LedgerFinding] = field(default_factory=list)
    _events: set[bytes] = field(default_factory=set)
    _consents: dict[UserId, bool] = field(default_factory=dict)
    _erasures: Counter[UserId] = field(default_factory=Counter)

    def apply(self, sequence: int, body: pb.FeedbackRecord) -> None:
        """Check one record against those before it."""
        kind = body.WhichOneof("body") or ""
        self.num_records[kind] += 1
        match kind:
            case "event":
                self._check_event(sequence, body.event)
            case "consent":
                user = UserId(body.consent.tenant, body.consent.user_digest)
                self._consents[user] = body.consent.granted
            case "erasure":
                self._check_erasure(sequence, body.erasure)
            case _:  # opens an epoch
                pass

    def _check_event(self, sequence: int, event: pb.FeedbackEventRecord) -> None:
        user = UserId(event.tenant, event.user_digest)
        if event.event_digest in self._events:
            self._report("unique", f"record {sequence} holds an event again")
        if not self._consents.get(user, False):
            self._report("consent", f"record {sequence} holds an event without consent")
        if event.key_generation != self._erasures[user]:
            self._report("erasure", f"record {sequence} has a key of before or after an erasure")
        self._events.add(event.event_digest)

    def _check_erasure(self, sequence: int, erasure: pb.FeedbackErasure) -> None:
        user = UserId(erasure.tenant, erasure.user_digest)
        if erasure.key_generation != self._erasures[user]:
            self._report("erasure", f"record {sequence} erases another generation of a key")
        self._erasures[user] += 1
        self._consents[user] = False

    def _report(self, invariant: str, what: str) -> None:
        self.findings.append(LedgerFinding(invariant, what))


def audit_ledger(store: Store, *, uid: str) -> LedgerAudit:
    """Audit all accepted records of a ledger; blocks.

    Raises:
        StoreError: the store did not answer.
    """
    audit = LedgerAudit()
    try:
        reader = LogReader.read_listing(ledger_source(store, uid))
        for segment in reader.accepted_segments():
            for framed in segment.records:
                audit.head = records.check_chain(framed, segment.where, previous=audit.head)
                record = records.parse_record(framed, segment.where)
                audit.apply(record.sequence, record.body)
    except CorruptError as error:
        invariant = "chain" if "chain" in str(error) else "log"
        audit.findings.append(LedgerFinding(invariant, str(error)))
    return audit
