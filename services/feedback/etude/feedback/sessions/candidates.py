"""Candidates for tasks: the served sessions of one tenant, and what speaks against each."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.agent.chat import ChatFormat
from etude.agent.chat.pieces import PieceReader
from etude.agent.toolsets import list_schemas
from etude.common import turn_log
from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.redact.redactor import Redactor
from etude.feedback.ledger.reading import LedgerReader
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.sessions.kept_change import KINDS, SessionEvents
from etude.feedback.sessions.patches import join_patches
from etude.feedback.sessions.review import (
    MAX_TEXT_CHARS,
    RefusedSession,
    SessionEntry,
    SessionReview,
    find_refusals,
)
from etude.feedback.turn_keys import find_user, read_turn
from etude.feedback.windows.feeds import TurnFeed
from etude.v1 import turns_pb2

log = logging.getLogger(__name__)

CLOCKS_MS = 300_000
"""Difference between the clocks of a gateway and of the ledger."""
MAX_REFUSED = 10_000
"""Sessions without a text that a review lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateOptions:
    """Sessions that are looked for."""

    tenant: str
    terms: tuple[str, ...]
    """Versions of the terms that allow tasks of sessions."""
    limit: int
    """Candidates with a text."""


class SessionStart(NamedTuple):
    """First turn of a session."""

    user: UserId
    started_ms: int
    prompt: tuple[int, ...]
    """Tokens of the first prompt; empty where nothing was kept of the session."""


@dataclass(slots=True)
class SessionFinder:
    """Finds the sessions of a tenant; blocks."""

    store: Store
    ledger: LedgerReader
    chat: ChatFormat | None
    """Of the model, to read requests; without it they are left empty."""
    options: CandidateOptions
    _reader: PieceReader | None = field(init=False)
    _redactor: Redactor = field(init=False)

    def __post_init__(self) -> None:
        chat = self.chat
        self._reader = None if chat is None else PieceReader.of(chat, list_schemas())
        self._redactor = Redactor(self.ledger.secret.redaction_key(self.options.tenant))

    def find(self) -> SessionReview:
        """List the sessions; those without a text only by id and reason.

        Raises:
            CorruptError: the ledger is damaged.
            StoreError: a store did not answer.
        """
        kept = self._read_events()
        entries: list[SessionEntry] = []
        refused: list[RefusedSession] = []
        for session, start in self._read_starts(kept.keys()).items():
            reasons = find_user_refusals(
                self.ledger, start.user, start.started_ms, self.options.terms
            )
            if not reasons and session not in kept:
                reasons = ["NoReference"]
            if reasons:
                refused.append(RefusedSession(session=session, refusals=reasons))
            elif len(entries) < self.options.limit:
                entry = self._make_entry(session, start, kept[session])
                if entry is None:
                    refused.append(RefusedSession(session=session, refusals=["TooLarge"]))
                else:
                    entries.append(entry)
        return SessionReview(
            tenant=self.options.tenant,
            terms=list(self.options.terms),
            sessions=entries,
            refused=refused[:MAX_REFUSED],
        )

    def _read_events(self) -> dict[str, SessionEvents]:
        """Events of the sessions of which something was kept."""
        found: dict[str, SessionEvents] = {}
        for _, event in self.ledger.read_events(self.options.tenant, KINDS):
            data = event.data
            name = turn_log.identify_rollout(data.tenant, data.user, data.rollout)
            found.setdefault(name, SessionEvents()).add(event)
        return {name: each for name, each in found.items() if each.find_kept_change()}

    def _read_starts(self, kept: Collection[str]) -> dict[str, SessionStart]:
        starts: dict[str, SessionStart] = {}
        for stored in TurnFeed(self.store).read():
            for record in stored.segment.turns:
                if record.tenant != self.options.tenant or record.is_side:
                    continue
                name = record.rollout_id
                start = self._read_start(record, is_kept=name in kept)
                known = starts.get(name)
                if start is None:
                    continue
                if known is None or start.started_ms < known.started_ms:
                    starts[name] = start
        return starts

    def _read_start(self, record: turns_pb2.TurnRecord, *, is_kept: bool) -> SessionStart | None:
        """Start of a session; None if the record is damaged."""
        user = find_user(record, self.ledger.secret)
        if user is None:
            return None
        prompt: tuple[int, ...] = ()
        if is_kept and not record.num_prefix_tokens:
            try:
                readable = read_turn(record, self.ledger.state, self.ledger.keys)
            except CorruptError as error:
                log.warning("a turn is left out: %s", error)
                return None
            prompt = () if readable is None else tuple(readable.prompt_token_ids)
        return SessionStart(user, record.time_unix_nanos // 1_000_000, prompt)

    def _make_entry(
        self, session: str, start: SessionStart, events: SessionEvents
    ) -> SessionEntry | None:
        """Entry of a session; None if its texts are longer than a review takes."""
        change = events.find_kept_change()
        request, _ = self._redactor.redact_text(self._read_request(start.prompt))
        if max(len(request), sum(len(each.text) for each in change)) > MAX_TEXT_CHARS:
            return None
        entry = SessionEntry(
            session=session,
            request=request,
            reference=join_patches([each for each in change if not each.is_test]),
            tests=join_patches([each for each in change if each.is_test]),
            user=start.user.digest,
            started_ms=start.started_ms,
        )
        return entry.model_copy(update={"refusals": find_refusals(entry, self._redactor)})

    def _read_request(self, prompt: tuple[int, ...]) -> str:
        if self._reader is None or not prompt:
            return ""
        pieces = self._reader.read_opening(prompt)
        return next((each.text.strip() for each in pieces if each.role == "user"), "")


def find_user_refusals(
    ledger: LedgerReader, user: UserId, started_ms: int, terms: Collection[str]
) -> list[str]:
    """Reasons that a user's decisions give: an erasure, or no consent to tasks now."""
    erased_ms = ledger.erased_ms.get(user)
    if erased_ms is not None and started_ms <= erased_ms + CLOCKS_MS:
        return ["Erased"]
    consent = ledger.state.consents.get(user)
    if consent is None or not consent.granted or consent.policy_version not in terms:
        return ["NoConsentForTasks"]
    return []
