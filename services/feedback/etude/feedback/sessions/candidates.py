"""Candidates for tasks: the served sessions of one tenant, and what speaks against each."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.agent.chat import ChatFormat
from etude.agent.chat.pieces import PieceReader
from etude.agent.toolsets import list_schemas
from etude.common.blobs import Store
from etude.common.errors import CorruptError, Problem, UserError
from etude.common.feedback import payloads
from etude.common.feedback.events import AnyEvent
from etude.common.feedback.payloads import TaskOutcome
from etude.common.redact.redactor import Redactor
from etude.common.turns import turn_log
from etude.feedback.ledger.reading import LedgerReader
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.sessions.patches import FilePatch, join_patches, split_patch
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

KINDS = frozenset({"demonstration", "edit_applied", "edit_observed", "task_closed"})
"""Events that tell it."""
_UNWANTED = frozenset({TaskOutcome.ABANDONED, TaskOutcome.REVERTED})


@dataclass(slots=True)
class SessionEvents:
    """Events of one session that tell what was kept."""

    demonstration: str = ""
    """Text that the user kept, the newest one."""
    edits: dict[str, payloads.EditAppliedPayload] = field(default_factory=dict)
    """The first of each name, in the order of the ledger."""
    alive: dict[str, int] = field(default_factory=dict)
    """Lines of an edit that the newest look found."""
    outcome: TaskOutcome | None = None

    def add(self, event: AnyEvent) -> None:
        """Add an event, in the order of the ledger."""
        match event.data.payload:
            case payloads.DemonstrationPayload() as kept:
                self.demonstration = kept.text
            case payloads.EditAppliedPayload() as edit:
                self.edits.setdefault(edit.edit, edit)
            case payloads.EditObservedPayload(is_file_seen=True) as look:
                self.alive[look.edit] = look.num_alive_lines
            case payloads.TaskClosedPayload() as end:
                self.outcome = end.outcome
            case _:  # a file that was not found
                pass

    def find_kept_change(self) -> list[FilePatch]:
        """The demonstration, if it is a patch; else the edits of which every line survived.

        Empty if there is none, or if the user abandoned or reverted the task.
        """
        if self.outcome in _UNWANTED:
            return []
        shown = [each for each in split_patch(self.demonstration) if each.path]
        if shown:
            return shown
        return [
            each
            for name, edit in self.edits.items()
            if edit.diff and self.alive.get(name, -1) >= edit.num_lines
            for each in split_patch(edit.diff)
            if each.path
        ]


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


def read_session(
    store: Store, ledger: LedgerReader, tenant: str, session: str, terms: Collection[str]
) -> list[turns_pb2.TurnRecord]:
    """Read the turns of a session with their tokens, without those for a product's own use.

    Args:
        store: of the route.
        ledger: whose users' keys open the turns.
        tenant: of the session.
        session: as `turn_log.identify_rollout` names it.
        terms: versions of the terms that allow it.

    Raises:
        UserError: there is no such session, or its user does not allow it now.
        CorruptError: a turn or a key is damaged.
        StoreError: a store did not answer.
    """
    found: list[turns_pb2.TurnRecord] = []
    for stored in TurnFeed(store).read():
        for record in stored.segment.turns:
            if (record.tenant, record.rollout_id) != (tenant, session) or record.is_side:
                continue
            user = find_user(record, ledger.secret)
            started_ms = record.time_unix_nanos // 1_000_000
            # A record that names no user is nobody's who could allow it.
            reasons = (
                ["NoConsentForTasks"]
                if user is None
                else find_user_refusals(ledger, user, started_ms, terms)
            )
            if record.HasField("withheld"):
                reasons = [*reasons, "HoldsSecret"]
            turn = None if reasons else read_turn(record, ledger.state, ledger.keys)
            if turn is None:
                what = f"is not read: {', '.join(reasons or ['Erased'])}"
                fix = "choose a session of a user who allows it under --terms"
                raise UserError(Problem("Forbidden", what, f"session {session}", fix))
            found.append(turn)
    if not found:
        fix = "name one of the tenant: etude tasks from-sessions lists them"
        raise UserError(Problem("NotFound", f"tenant {tenant} has none", f"session {session}", fix))
    return sorted(found, key=lambda turn: turn.time_unix_nanos)
