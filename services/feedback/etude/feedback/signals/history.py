"""History of one served rollout: its turns, and the events about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from etude.common.feedback import payloads
from etude.common.feedback.payloads import TurnEndedPayload, TurnPayload, WireModel
from etude.common.weights import VersionId
from etude.feedback.ledger.user_keys import UserId
from etude.v1 import turns_pb2

MAX_EVENTS = 1_000
"""Events of one rollout that count: the first ones."""
_TEXT_CHARS = 1_000
"""Of a follow-up that are looked at."""


class TurnPlace(NamedTuple):
    """Place of a turn's record in the turn log."""

    key: str
    position: int


class ServedTurn(NamedTuple):
    """One turn, without its tokens."""

    place: TurnPlace
    started_ms: int
    """By the clock of the gateway, or of the store if that is earlier."""
    received_ms: int
    """Time at which its record was stored, by the clock of the store where that is known."""
    policy: VersionId | None
    """Version that sampled all of its tokens; None if there were several."""
    arm: str
    experiment: str
    config: str
    """Hash of what shapes the policy's behaviour beside its weights; 8 hexadecimal digits."""
    num_tokens: int
    """Sampled ones."""
    num_calls: int
    num_broken_calls: int
    """Calls that do not parse."""
    asks_question: bool
    """It has no call, and ends with a question to the user."""
    is_side: bool
    run_uid: str = ""
    """Run of the version; empty if its engine did not name it."""
    is_withheld: bool = False
    """Its record has no tokens, as redaction found something in it or before it."""


class RolloutEvent(NamedTuple):
    """One event about a rollout, without what no signal reads."""

    kind: str
    received_ms: int
    payload: WireModel
    sequence: int = 0
    """Record of the ledger."""

    @property
    def turn(self) -> int:
        """Number of the turn that it concerns; 0 for a kind that concerns none."""
        return self.payload.turn if isinstance(self.payload, TurnPayload) else 0


@dataclass(slots=True)
class RolloutHistory:
    """One served rollout: its turns, and the events about it."""

    rollout: str
    """As `turn_log.identify_rollout` names it."""
    user: UserId
    turns: list[ServedTurn] = field(default_factory=list)
    """In the order of their records."""
    events: list[RolloutEvent] = field(default_factory=list)
    """In the order of the ledger."""
    mask: str = ""
    """Reason why its records cannot be trained on, once that was tried."""

    @property
    def main_turns(self) -> Sequence[ServedTurn]:
        """Turns by which the policy is judged."""
        return [turn for turn in self.turns if not turn.is_side]

    @property
    def policy(self) -> VersionId | None:
        """Version that sampled all tokens of its main turns; None if there were several."""
        versions = {turn.policy for turn in self.main_turns}
        return versions.pop() if len(versions) == 1 and len(self._run_uids) <= 1 else None

    @property
    def run_uid(self) -> str:
        """Run of that version; empty if none is named, or several are."""
        run_uids = self._run_uids
        return run_uids.pop() if len(run_uids) == 1 else ""

    @property
    def _run_uids(self) -> set[str]:
        return {turn.run_uid for turn in self.main_turns if turn.run_uid}

    @property
    def config(self) -> str:
        """Configuration of its first main turn, as the product asked for it."""
        return (self.main_turns or self.turns)[0].config

    @property
    def started_ms(self) -> int:
        """Start of the first turn."""
        return min(turn.started_ms for turn in self.turns)

    @property
    def last_ms(self) -> int:
        """Receipt of the last turn, or of the last edit that was applied."""
        edits = (each.received_ms for each in self.events if each.kind == "edit_applied")
        return max(*(turn.received_ms for turn in self.turns), *edits, 0)

    @property
    def is_open(self) -> bool:
        """True if it edited something, and the end of its task is not known."""
        kinds = {each.kind for each in self.events}
        return "edit_applied" in kinds and "task_closed" not in kinds

    def payloads(self, kind: str) -> Sequence[Any]:
        """Payloads of one kind of event, in the order of the ledger."""
        return [each.payload for each in self.events if each.kind == kind]

    def ended_turns(self) -> Sequence[TurnEndedPayload]:
        """Ends of turns as the client told them, the last one of each turn."""
        ends = {end.turn: end for end in self.payloads("turn_ended")}
        return [*ends.values()]

    def add_event(self, event: RolloutEvent) -> None:
        """Add an event, unless there are too many."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)


def read_turn(record: turns_pb2.TurnRecord, place: TurnPlace, *, stored_ms: int = 0) -> ServedTurn:
    """Read a turn's record, without its tokens.

    Args:
        record: as the gateway wrote it.
        place: of the record.
        stored_ms: time at which it was stored; 0 where the store does not tell.
    """
    started_ms = record.time_unix_nanos // 1_000_000
    versions = {VersionId.from_proto(span.sampled) for span in record.spans}
    return ServedTurn(
        place=place,
        started_ms=min(started_ms, stored_ms or started_ms),
        received_ms=stored_ms or started_ms,
        policy=versions.pop() if len(versions) == 1 else None,
        arm=record.arm,
        experiment=record.experiment,
        config=record.config_hash[:4].hex(),
        num_tokens=_count_tokens(record),
        num_calls=record.num_calls,
        num_broken_calls=min(record.num_broken_calls, record.num_calls),
        asks_question=record.asks_question,
        is_side=record.is_side,
        run_uid=record.run_uid,
        is_withheld=record.HasField("withheld"),
    )


def _count_tokens(record: turns_pb2.TurnRecord) -> int:
    return record.withheld.num_tokens or record.sealed.num_tokens or len(record.token_ids)


def reduce_event(
    kind: str, received_ms: int, payload: WireModel, *, sequence: int = 0
) -> RolloutEvent | None:
    """Reduce an event to what signals read; None if they read nothing of it."""
    match payload:
        case payloads.EditAppliedPayload():
            payload = payload.model_copy(update={"line_hashes": [], "diff": ""})
        case payloads.FollowupPayload():
            payload = payload.model_copy(update={"text": payload.text[:_TEXT_CHARS]})
        case payloads.ReasonPayload():
            payload = payload.model_copy(update={"text": ""})
        case payloads.DemonstrationPayload() | payloads.AnnotatedPayload():
            return None
        case _:
            pass
    return RolloutEvent(kind, received_ms, payload, sequence)
