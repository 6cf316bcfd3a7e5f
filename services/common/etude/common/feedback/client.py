"""Client of feedback events: spools them, sends them in batches, and loses none.

Standard library alone, so that editors and other programs of users may import it. Its twin in
TypeScript is in clients/typescript; both pass clients/conformance/events.json.
"""

import hashlib
import hmac
import http.client
import json
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from etude.common.feedback.http_exchange import BATCH_TYPE, EVENTS_PATH, HttpAnswer
from etude.common.feedback.spool import EventSpool, SpoolBatch, SpoolCounts

BATCH_EVENTS = 100
BATCH_BYTES = 1 << 20
MAX_EVENT_BYTES = 256 << 10
MAX_EDIT_LINES = 4_096
"""Lines of one edit that are hashed; the service takes no more."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
_BLANKS = " \t\r\n"
_LATER = frozenset({408, 425, 429})
"""Statuses below 500 after which the same request may be answered otherwise."""
_TOO_MUCH = frozenset({400, 413})
"""Statuses of a whole batch that a part of it may not have."""


Post = Callable[[str, str, bytes], HttpAnswer]
"""Posts path, media type and body; raises OSError where no answer comes."""


class UserConsent(NamedTuple):
    """Decision of the user about feedback."""

    granted: bool
    terms: str
    """Version of the text that the user agreed to."""
    decided: str
    """Time of the decision, in RFC 3339 with a zone."""


class EventAuthor(NamedTuple):
    """Sender of events."""

    source: str
    """Client and version, such as "my-editor/1.2"; without blanks."""
    tenant: str
    user: str
    """Pseudonym of the user within the tenant."""


class EventContext(NamedTuple):
    """Conversation that an event is about."""

    subject: str
    """Conversation, by a name of the client's."""
    rollout: str
    """As the gateway's header x-etude-rollout says."""
    policy_version: str = ""
    """As the gateway's header x-policy-version says."""
    experiment: str = ""
    arm: str = ""


class FlushReport(NamedTuple):
    """Outcome of a flush."""

    num_sent: int
    waiting_bytes: int
    """Of events that are kept for a later flush."""
    problem: str
    """Reason why events wait; empty if none does."""


@dataclass(slots=True)
class EventClient:
    """Sends the events of one user; without consent it keeps and sends nothing."""

    spool: EventSpool
    post: Post
    author: EventAuthor
    consent: UserConsent | None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    make_id: Callable[[], str] = lambda: uuid.uuid4().hex
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    _batch_events: int = BATCH_EVENTS
    """Events of the next batch; halved where a whole batch is refused for its size or form."""

    def add(
        self, kind: str, payload: Mapping[str, Any], about: EventContext, *, event_id: str = ""
    ) -> str:
        """Add an event; it outlives this process once this returns.

        Args:
            kind: such as "accepted".
            payload: as the JSON schema of the kind says (GET /v1/schemas/KIND).
            about: conversation.
            event_id: for an event that may be made twice; a new one unless given.

        Returns:
            The event's id; empty if it is not kept: without consent, too large, or the spool full.

        Raises:
            OSError: the disk does not take it.
        """
        consent = self.consent
        if consent is None or not consent.granted:
            return ""
        event = make_event(
            kind,
            payload,
            about,
            self.author,
            consent,
            event_id=event_id or self.make_id(),
            time=self.now(),
        )
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )
        if len(line) > MAX_EVENT_BYTES:
            self.spool.refuse("TooLarge")
            return ""
        return str(event["id"]) if self.spool.append(line) else ""

    def flush(self, *, timeout_s: float = 10.0) -> FlushReport:
        """Send what waits, again and again until all is sent or time is over.

        Events that the service refuses for good are given up and counted by reason; where it is
        away, answers with 5xx or asks to wait, everything is kept. So it is where the key or the
        address is wrong, until both are corrected.

        Raises:
            OSError: the spool cannot be read.
        """
        deadline_s = self.monotonic() + timeout_s
        num_sent, num_failures = 0, 0
        while (batch := self._read()).lines:
            sent, problem, wait_s = self._send(batch)
            num_sent += sent
            if not problem:
                num_failures = 0
                continue
            backoff_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**num_failures)
            # Jitter: clients that failed together do not come again together.
            wait_s = max(wait_s, backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            num_failures += 1
            if self.monotonic() + wait_s > deadline_s:
                return FlushReport(num_sent, self.spool.read_counts().waiting_bytes, problem)
            self.sleep(wait_s)
        return FlushReport(num_sent, 0, "")

    def revoke(self) -> int:
        """Take the consent back: forget what waits, and tell the service.

        Returns:
            Number of events that were forgotten.

        Raises:
            OSError: the service could not be told; nothing waits any more, and it can be repeated.
        """
        num_events = self.spool.clear()
        self.consent = None
        body = {"user": self.author.user, "at": _write_time(self.now())}
        answer = self.post("/v1/revocations", "application/json", json.dumps(body).encode())
        if answer.status != 202:
            raise OSError(f"the service answered {answer.status}")
        return num_events

    def read_counts(self) -> SpoolCounts:
        """Read the counts of the spool."""
        return self.spool.read_counts()

    def _read(self) -> SpoolBatch:
        return self.spool.read_batch(max_events=self._batch_events, max_bytes=BATCH_BYTES)

    def _send(self, batch: SpoolBatch) -> tuple[int, str, float]:
        """Send a batch; returns the number of sent events, a problem, and the wait it asks for."""
        lines = batch.lines
        ids = [_read_id(line) for line in lines]
        readable = [line for line, event_id in zip(lines, ids, strict=True) if event_id]
        try:
            answer = self.post(EVENTS_PATH, BATCH_TYPE, b"[" + b",".join(readable) + b"]")
        except (OSError, http.client.HTTPException) as error:
            return 0, f"no answer ({type(error).__name__})", 0.0
        if answer.status != 200:
            return self._take_refusal(batch, answer)
        results = _read_results(answer.body, [each for each in ids if each])
        if results is None:
            return 0, "the answer is no list of results", 0.0
        given_up: Counter[str] = Counter(Unreadable=len(lines) - len(readable))
        again: list[bytes] = []
        for line, (status, reason) in zip(readable, results, strict=True):
            if status >= 500 or status in _LATER:
                again.append(line)
            elif status not in {200, 202}:
                given_up[f"{status} {reason}"] += 1
        num_sent = len(lines) - len(again) - given_up.total()
        self.spool.commit(batch, num_sent=num_sent, given_up=+given_up, again=again)
        self._batch_events = BATCH_EVENTS
        return num_sent, f"{len(again)} events are to be sent again" if again else "", 0.0

    def _take_refusal(self, batch: SpoolBatch, answer: HttpAnswer) -> tuple[int, str, float]:
        """Take an answer to a whole batch other than results."""
        status = answer.status
        if status in _TOO_MUCH and len(batch.lines) > 1:
            self._batch_events = len(batch.lines) // 2
            return 0, "", 0.0
        if status in _TOO_MUCH:
            self.spool.commit(batch, num_sent=0, given_up={f"{status} Refused": 1})
            self._batch_events = BATCH_EVENTS
            return 0, "", 0.0
        # Where key or address are wrong, sending again would be answered in the same way.
        is_later = status >= 500 or status in _LATER
        return 0, f"the service answered {status}", answer.retry_after_s if is_later else math.inf


def make_event(  # noqa: PLR0913 - the parts of an event
    kind: str,
    payload: Mapping[str, Any],
    about: EventContext,
    author: EventAuthor,
    consent: UserConsent,
    *,
    event_id: str,
    time: datetime,
) -> dict[str, Any]:
    """Make one CloudEvent."""
    data: dict[str, Any] = {"tenant": author.tenant, "user": author.user, "rollout": about.rollout}
    optional = {
        "policyVersion": about.policy_version,
        "experiment": about.experiment,
        "arm": about.arm,
    }
    data |= {name: value for name, value in optional.items() if value}
    data["consent"] = {
        "granted": consent.granted,
        "policyVersion": consent.terms,
        "at": consent.decided,
    }
    data["payload"] = dict(payload)
    return {
        "specversion": "1.0",
        "id": event_id,
        "source": author.source,
        "type": f"dev.etude.feedback.{kind}.v1",
        "subject": about.subject,
        "time": _write_time(time),
        "data": data,
    }


def hash_lines(secret: bytes, lines: Iterable[str]) -> list[str]:
    """Hash lines of an edit, sorted: 16 hexadecimal digits each, of HMAC-SHA-256.

    Indentation and blanks at the end do not count; blank lines have no hash, as every file has
    them. The secret stays with the client, so that the service cannot try out lines.

    Args:
        secret: of the client, at least 16 bytes.
        lines: of the edit; those beyond `MAX_EDIT_LINES` that are not blank are left out.
    """
    stripped = (line.strip(_BLANKS) for line in lines)
    hashed = [line for line in stripped if line][:MAX_EDIT_LINES]
    return sorted(
        hmac.new(secret, line.encode("utf-8", "replace"), hashlib.sha256).hexdigest()[:16]
        for line in hashed
    )


def count_alive_lines(secret: bytes, line_hashes: Sequence[str], text: str) -> int:
    """Count the lines of an edit that a file still has; one that stood twice may count twice."""
    present = Counter(
        hmac.new(
            secret, line.strip(_BLANKS).encode("utf-8", "replace"), hashlib.sha256
        ).hexdigest()[:16]
        for line in text.split("\n")
    )
    return (Counter(line_hashes) & present).total()


def _read_id(line: bytes) -> str:
    """Id of a spooled event; empty if the line is damaged."""
    try:
        event_id = json.loads(line)["id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return event_id if isinstance(event_id, str) else ""


def _read_results(body: bytes, ids: Sequence[str]) -> list[tuple[int, str]] | None:
    """Status and reason of each event; None if the answer is not to these events."""
    try:
        listed = json.loads(body)["results"]
        results = [(each["status"], str(each["reason"]), each["id"]) for each in listed]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if len(results) != len(ids) or not all(type(status) is int for status, _, _ in results):
        return None
    # The id of an event that could not be read is empty.
    if any(
        named not in {"", event_id} for (_, _, named), event_id in zip(results, ids, strict=True)
    ):
        return None
    return [(status, reason) for status, reason, _ in results]


def _write_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
