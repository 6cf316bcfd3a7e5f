"""Intake of events: checked, redacted and appended one by one, acknowledged together."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pydantic_core

from etude.common.api_keys import KeyOwner, KeyScope
from etude.common.errors import CorruptError, InvalidFieldError, StoreError, UnavailableError
from etude.common.feedback.events import MAX_EVENT_BYTES, AnyEvent, parse_event
from etude.common.redact.redactor import Redactor
from etude.feedback import metrics
from etude.feedback.ledger.consent import ConsentDecision, ConsentRefusal, decide_consent
from etude.feedback.ledger.ledger import FeedbackLedger, NewEvent, UserKey
from etude.feedback.ledger.sealing import content_digest
from etude.feedback.ledger.state import UserConsent
from etude.feedback.ledger.user_keys import UserId

MAX_PENDING = 20_000
MAX_PENDING_BYTES = 256 << 20
"""Records that wait for the store, and their bytes; with more, what appends is refused for now."""
ACKNOWLEDGE_S = 30.0
"""Longest wait for the store. A client that sends the event again is told once it is durable."""
_HASHES = frozenset({"lineHashes"})
"""Fields of hexadecimal digits, which may be thousands."""
_THREAD_BYTES = 16 << 10
"""Larger events are redacted in a thread, so that others do not wait."""


class EventAnswer(NamedTuple):
    """Answer to one event."""

    event_id: str
    """Empty if it could not be read."""
    status: int
    """As of HTTP."""
    reason: str
    message: str = ""
    sequence: int | None = None
    """Record that must be durable before the answer is given."""

    def to_json(self) -> dict[str, str | int]:
        """The answer as clients see it."""
        return {
            "id": self.event_id,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
        }


@dataclass(slots=True)
class EventIntake:
    """Takes events of clients into a ledger."""

    ledger: FeedbackLedger
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    _redactors: dict[str, Redactor] = field(default_factory=dict)

    async def take(self, items: list[bytes], owner: KeyOwner) -> list[EventAnswer]:
        """Take events in order; what is stored is durable when this returns.

        Raises:
            UnavailableError: the store is away; clients send the events again.
            FencedError: another writer took the ledger over.
        """
        self.require_room()
        checked = [self._check(item, owner) for item in items]
        try:
            await self._load_keys(checked, owner)
            answers = [await self._answer(each, owner) for each in checked]
        except StoreError as error:
            raise UnavailableError(f"the store of keys is away: {error}") from error
        await self.acknowledge(max((a.sequence or 0 for a in answers), default=0))
        return answers

    def require_room(self) -> None:
        """Refuse to append while too much waits for the store; call it just before.

        Raises:
            UnavailableError: the store is away or slow.
        """
        log = self.ledger.log
        if log.depth >= MAX_PENDING or log.pending_bytes >= MAX_PENDING_BYTES:
            what = f"{log.depth} records of {log.pending_bytes} bytes wait for the object store"
            raise UnavailableError(what)

    async def acknowledge(self, sequence: int) -> None:
        """Wait until a record is durable; 0 for none.

        Raises:
            UnavailableError: the store is away.
        """
        metrics.PENDING.set(self.ledger.log.depth)
        try:
            async with asyncio.timeout(ACKNOWLEDGE_S):
                await self.ledger.wait_durable(sequence)
        except TimeoutError:
            raise UnavailableError("the object store is away: send the events again") from None

    def _check(self, data: bytes, owner: KeyOwner) -> AnyEvent | EventAnswer:
        """The event, if it is well-formed and its sender may send it."""
        if len(data) > MAX_EVENT_BYTES:
            what = f"an event has at most {MAX_EVENT_BYTES} bytes"
            return EventAnswer("", 413, "TooLarge", what)
        try:
            event = parse_event(data)
        except InvalidFieldError as error:
            return EventAnswer("", 400, "InvalidEvent", str(error))
        return _check_owner(event, owner) or self._check_identifiers(event) or event

    async def _load_keys(self, checked: Sequence[AnyEvent | EventAnswer], owner: KeyOwner) -> None:
        """Read or make the keys of all users concurrently: each may cost a round trip."""
        events = [each for each in checked if not isinstance(each, EventAnswer)]
        # Of a user without consent nothing is made.
        users = {
            self._user(event) for event in events if self._decide(event, owner).refusal is None
        }
        results = await asyncio.gather(*map(self.ledger.user_key, users), return_exceptions=True)
        for result in results:
            # A damaged key is the answer to the events of its user alone.
            if isinstance(result, BaseException) and not isinstance(result, CorruptError):
                raise result

    async def _answer(self, checked: AnyEvent | EventAnswer, owner: KeyOwner) -> EventAnswer:
        if isinstance(checked, EventAnswer):
            answer, kind = checked, "unknown"
        else:
            answer, kind = await self._store(checked, owner), checked.kind
        metrics.EVENTS.labels(kind=kind, result=answer.reason).inc()
        return answer

    async def _store(self, event: AnyEvent, owner: KeyOwner) -> EventAnswer:
        decision = self._decide(event, owner)
        if decision.refusal is not None:
            return self._refuse(event, decision.refusal, decision.change)
        original = event.model_dump_json().encode()
        redacted, num_redactions = await self._redact(event, original)
        if event.kind == "dryrun":
            return EventAnswer(event.id, 200, "Checked", f"{num_redactions} redactions")
        try:
            key = await self.ledger.user_key(self._user(event))
        except CorruptError:
            what = "the key of the user is damaged: nothing was stored"
            return EventAnswer(event.id, 500, "DamagedKey", what)
        data = event.data
        new = NewEvent(
            self.ledger.secret.event_digest(data.tenant, data.user, event.source, event.id),
            event.kind,
            original,
            redacted,
            num_redactions,
        )
        return self._append(event, new, key, owner)

    def _append(self, event: AnyEvent, new: NewEvent, key: UserKey, owner: KeyOwner) -> EventAnswer:
        """Append an event unless something changed while its key was read; nothing waits here.

        Raises:
            UnavailableError: the user was erased meanwhile, or too much waits for the store.
        """
        known = self.ledger.find_event(new.digest)
        if known is not None:
            if content_digest(new.original, key.key) == known.content_digest:
                return EventAnswer(event.id, 200, "Duplicate", sequence=known.sequence)
            what = "an event of this source and id has other content"
            return EventAnswer(event.id, 409, "ReusedId", what)
        decision = self._decide(event, owner)
        if decision.refusal is not None:
            return self._refuse(event, decision.refusal, decision.change)
        self.require_room()
        now_ms = self.clock_ms()
        if decision.change is not None:
            self.ledger.append_consent(key.user, decision.change, now_ms=now_ms)
        if key.generation != self.ledger.state.generation(key.user):
            # Erased while the key was read, and a later decision came with the event.
            raise UnavailableError("the user was erased meanwhile: send the event again")
        sequence = self.ledger.append_event(new, key, now_ms=now_ms)
        metrics.REDACTIONS.inc(new.num_redactions)
        return EventAnswer(event.id, 202, "Stored", sequence=sequence)

    def _user(self, event: AnyEvent) -> UserId:
        return self.ledger.secret.user_id(event.data.tenant, event.data.user)

    def _decide(self, event: AnyEvent, owner: KeyOwner) -> ConsentDecision:
        consent = event.data.consent
        decided_ms = int(consent.at.timestamp() * 1_000)
        return decide_consent(
            UserConsent(consent.granted, consent.policy_version, decided_ms),
            self.ledger.state.consents.get(self._user(event)),
            terms=owner.consent,
            now_ms=self.clock_ms(),
        )

    def _refuse(
        self, event: AnyEvent, refusal: ConsentRefusal, change: UserConsent | None
    ) -> EventAnswer:
        """Refuse an event for want of consent; a revocation is recorded first."""
        if refusal is ConsentRefusal.FUTURE:
            what = "data.consent.at: lies in the future"
            return EventAnswer(event.id, 400, "InvalidEvent", what)
        sequence = None
        if change is not None:
            self.require_room()
            now_ms = self.clock_ms()
            sequence = self.ledger.append_consent(self._user(event), change, now_ms=now_ms)
        what = "no consent: nothing was stored"
        return EventAnswer(event.id, 403, refusal.value, what, sequence)

    async def _redact(self, event: AnyEvent, original: bytes) -> tuple[bytes, int]:
        redactor = self._redactor(event.data.tenant)
        if len(original) > _THREAD_BYTES:
            return await asyncio.to_thread(_redact_payload, original, redactor)
        return _redact_payload(original, redactor)

    def _check_identifiers(self, event: AnyEvent) -> EventAnswer | None:
        """Refuse names that hold a secret: replaced, they would name something else."""
        redactor = self._redactor(event.data.tenant)
        data = event.data
        names = (event.id, event.source, event.subject, event.dataschema, data.user, data.rollout)
        settings = (data.policy_version, data.experiment, data.arm, data.consent.policy_version)
        for redaction in redactor.find("\n".join((*names, *settings)).encode()):
            if not redaction.rule.is_personal:
                what = f"a name of the event holds a secret ({redaction.rule.name})"
                return EventAnswer("", 400, "InvalidEvent", what)
        return None

    def _redactor(self, tenant: str) -> Redactor:
        redactor = self._redactors.get(tenant)
        if redactor is None:
            redactor = Redactor(self.ledger.secret.redaction_key(tenant))
            self._redactors[tenant] = redactor
        return redactor


def check_user(owner: KeyOwner, user: str) -> str:
    """Return why a key may not speak for a user; empty if it may."""
    if KeyScope.USERS in owner.scopes:
        return ""
    if KeyScope.FEEDBACK in owner.scopes and owner.user == user:
        return ""
    return "the API key may not speak for this user"


def _check_owner(event: AnyEvent, owner: KeyOwner) -> EventAnswer | None:
    if not owner.tenant or event.data.tenant != owner.tenant:
        return EventAnswer(event.id, 403, "OtherTenant", "the API key is of another tenant")
    problem = check_user(owner, event.data.user)
    return EventAnswer(event.id, 403, "OtherUser", problem) if problem else None


def _redact_payload(original: bytes, redactor: Redactor) -> tuple[bytes, int]:
    """Redact the payload of an event; its other fields are names and times."""
    event = pydantic_core.from_json(original)
    data = event["data"]
    data["payload"], num_redactions = redactor.redact_json(data["payload"], skip=_HASHES)
    return pydantic_core.to_json(event), num_redactions
