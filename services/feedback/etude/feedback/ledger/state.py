"""State of a ledger: a fold over its records, the same live and after a restart."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.feedback.ledger.records import ChainedRecord
from etude.feedback.ledger.user_keys import UserId
from etude.v1 import feedback_ledger_pb2 as pb


class UserConsent(NamedTuple):
    """Newest decision of a user."""

    granted: bool
    policy_version: str
    decided_ms: int
    """By the clock of the client."""
    received_ms: int = sys.maxsize
    """Time at which it was recorded; of one that is not yet, the largest."""


class KnownEvent(NamedTuple):
    """An event of the ledger, by which a repeated one is known again."""

    sequence: int
    content_digest: bytes


@dataclass(slots=True)
class LedgerState:
    """Events, consents and erasures. An event takes some 250 bytes of memory."""

    events: dict[bytes, KnownEvent] = field(default_factory=dict)
    """By event digest."""
    consents: dict[UserId, UserConsent] = field(default_factory=dict)
    erasures: dict[UserId, int] = field(default_factory=dict)
    """Number of erasures of a user, which is the generation of the user's next key."""
    num_events: Counter[UserId] = field(default_factory=Counter)
    """Events of each user since the last erasure."""

    def generation(self, user: UserId) -> int:
        """Generation of the key for a user's next event."""
        return self.erasures.get(user, 0)

    def is_usable(self, event: pb.FeedbackEventRecord) -> bool:
        """Return true if the user consents now and has not been erased since the event."""
        user = UserId(event.tenant, event.user_digest)
        consent = self.consents.get(user)
        return (
            consent is not None
            and consent.granted
            and event.key_generation == self.generation(user)
        )

    def apply(self, record: ChainedRecord) -> None:
        """Apply one record."""
        body = record.body
        match body.WhichOneof("body"):
            case "event":
                event = body.event
                known = KnownEvent(record.sequence, event.content_digest)
                self.events.setdefault(event.event_digest, known)
                self.num_events[UserId(event.tenant, event.user_digest)] += 1
            case "consent":
                self._apply_consent(body.consent)
            case "erasure":
                self._apply_erasure(body.erasure)
            case _:  # opens an epoch
                pass

    def _apply_consent(self, body: pb.FeedbackConsent) -> None:
        user = UserId(body.tenant, body.user_digest)
        self.consents[user] = UserConsent(
            body.granted, body.policy_version, body.decided_ms, body.received_ms
        )

    def _apply_erasure(self, body: pb.FeedbackErasure) -> None:
        user = UserId(body.tenant, body.user_digest)
        self.erasures[user] = body.key_generation + 1
        self.num_events.pop(user, None)
        # Events that are sent again must not bring the user back: only a later decision does.
        consent = self.consents.get(user)
        decided_ms = max(body.received_ms, consent.decided_ms if consent else 0)
        self.consents[user] = UserConsent(granted=False, policy_version="", decided_ms=decided_ms)
