"""History of one served rollout: its turns, and the events about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from etude.common.feedback import payloads
from etude.common.feedback.payloads import WireModel
from etude.common.weights import VersionId
from etude.feedback.ledger.user_keys import UserId
from etude.v1 import turns_pb2

MAX_EVENTS = 2_000
"""Events of one rollout that count: the first ones."""
_TEXT_CHARS = 4_000
"""Of a follow-up that are looked at."""


class TurnPlace(NamedTuple):
    """Place of a turn's record in the turn log."""

    key: str
    position: int


class ServedTurn(NamedTuple):
    """One turn, without its tokens."""

    place: TurnPlace
    started_ms: int
    policy: VersionId | None
    """Version that sampled all of its tokens; None if there were several."""
    arm: str
    experiment: str
    config: str
    """Hash of what shapes the policy's behaviour beside its weights; 8 hexadecimal digits."""
    num_tokens: int
    """Sampled ones."""
    is_side: bool


class RolloutEvent(NamedTuple):
    """One event about a rollout, without what no signal reads."""

    kind: str
    received_ms: int
    payload: WireModel


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
        return versions.pop() if len(versions) == 1 else None

    @property
    def started_ms(self) -> int:
        """Start of the first turn."""
        return min(turn.started_ms for turn in self.turns)

    @property
    def last_ms(self) -> int:
        """Start of the last turn, or receipt of the last edit that was applied."""
        edits = (each.received_ms for each in self.events if each.kind == "edit_applied")
        return max(*(turn.started_ms for turn in self.turns), *edits, 0)

    def payloads(self, kind: str) -> Sequence[Any]:
        """Payloads of one kind of event, in the order of the ledger."""
        return [each.payload for each in self.events if each.kind == kind]

    def add_event(self, event: RolloutEvent) -> None:
        """Add an event, unless there are too many."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)


def read_turn(record: turns_pb2.TurnRecord, place: TurnPlace) -> ServedTurn:
    """Read a turn's record, without its tokens."""
    versions = {VersionId.from_proto(span.sampled) for span in record.spans}
    return ServedTurn(
        place=place,
        started_ms=record.time_unix_nanos // 1_000_000,
        policy=versions.pop() if len(versions) == 1 else None,
        arm=record.arm,
        experiment=record.experiment,
        config=record.config_hash[:4].hex(),
        num_tokens=len(record.token_ids),
        is_side=record.is_side,
    )


def reduce_event(kind: str, received_ms: int, payload: WireModel) -> RolloutEvent | None:
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
    return RolloutEvent(kind, received_ms, payload)
