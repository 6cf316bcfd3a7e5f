"""Rollouts that are in no window yet: a fold over turns, events, consents and windows."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.feedback.windows import WindowManifest
from etude.feedback.ledger.user_keys import LedgerSecret, UserId
from etude.feedback.signals.history import (
    RolloutEvent,
    RolloutHistory,
    TurnPlace,
    read_turn,
)
from etude.feedback.turn_keys import find_user
from etude.feedback.windows.feeds import (
    ConsentItem,
    ErasureItem,
    EventItem,
    LedgerItem,
    StoredTurns,
)
from etude.v1 import turns_pb2

log = logging.getLogger(__name__)

ERASED = "Erased"
NO_CONSENT = "NoConsent"
MAX_TURNS = 10_000
"""Turns of one rollout; with more it is masked."""
_MAX_EARLY = 100_000
"""Events about rollouts without a turn that are kept: clients name rollouts as they like."""
_CLOCKS_MS = 300_000
"""Difference between the clocks of a gateway and of this service."""


class Erasure(NamedTuple):
    """Newest erasure of a user."""

    sequence: int
    received_ms: int


class LateEvent(NamedTuple):
    """An event that came after the window of its rollout was closed."""

    sequence: int
    """Record of the ledger."""
    kind: str


@dataclass(slots=True)
class WaitingRollouts:
    """Served rollouts that are in no window, and what the ledger says about their users."""

    secret: LedgerSecret
    histories: dict[str, RolloutHistory] = field(default_factory=dict)
    """By id of the rollout."""
    consents: dict[UserId, str] = field(default_factory=dict)
    """Version of the terms that users agree to now; users who do not are left out."""
    erasures: dict[UserId, Erasure] = field(default_factory=dict)
    settled: set[bytes] = field(default_factory=set)
    """Ids of rollouts that are in a window, or excluded from one."""
    late: list[LateEvent] = field(default_factory=list)
    """Events about settled rollouts that no window names yet."""
    _last_sequence: int = 0
    """Newest record of the ledger that counts in a window."""
    _early: dict[str, list[RolloutEvent]] = field(default_factory=dict)
    """Events about rollouts without a turn yet; the oldest rollouts first."""
    _num_early: int = 0

    def add_turns(self, stored: StoredTurns) -> None:
        """Add the turns of one object of the turn log."""
        for position, record in enumerate(stored.segment.turns):
            place = TurnPlace(stored.key, position)
            self._add_turn(record, place, stored_ms=stored.stored_ms)

    def apply(self, item: LedgerItem) -> None:
        """Apply one record of the ledger."""
        match item:
            case EventItem():
                self._add_event(item)
            case ConsentItem(granted=True):
                self.consents[item.user] = item.policy_version
            case ConsentItem():
                self.consents.pop(item.user, None)
            case ErasureItem():
                self.consents.pop(item.user, None)
                self.erasures[item.user] = Erasure(item.sequence, item.received_ms)

    def settle(self, manifest: WindowManifest) -> None:
        """Forget the rollouts that a window has or excludes, but for events that came later."""
        self._last_sequence = manifest.last_sequence
        names = [each.rollout for each in manifest.rollouts]
        names += [each.rollout for each in manifest.exclusions]
        for name in names:
            history = self.histories.get(name)
            events = history.events if history else self._early.get(name, [])
            self.late += [LateEvent(each.sequence, each.kind) for each in events]
        self.late = [each for each in self.late if each.sequence > manifest.last_sequence]
        self.forget(names)

    def forget(self, names: Iterable[str]) -> None:
        """Forget rollouts by id, with all turns and events about them that may still come."""
        for name in names:
            self.settled.add(bytes.fromhex(name))
            self.histories.pop(name, None)
            self._pop_early(name)

    def find_mask(self, history: RolloutHistory) -> str:
        """Reason why a rollout is not trained, as far as its user and its records say; or empty."""
        erasure = self.erasures.get(history.user)
        if erasure is not None and history.started_ms <= erasure.received_ms + _CLOCKS_MS:
            return ERASED
        if history.user not in self.consents:
            return NO_CONSENT
        return _find_turn_mask(history)

    def _add_turn(self, record: turns_pb2.TurnRecord, place: TurnPlace, *, stored_ms: int) -> None:
        name = record.rollout_id
        if not _is_rollout(name) or bytes.fromhex(name) in self.settled:
            return
        history = self.histories.get(name)
        if history is None:
            user = find_user(record, self.secret)
            if user is None:
                log.warning("turn %s is left out: it names no user", record.turn_id)
                return
            history = self.histories[name] = RolloutHistory(name, user)
            for event in self._pop_early(name):
                history.add_event(event)
        if len(history.turns) <= MAX_TURNS:
            history.turns.append(read_turn(record, place, stored_ms=stored_ms))

    def _add_event(self, item: EventItem) -> None:
        if item.event is None:
            return
        history = self.histories.get(item.rollout)
        if history is not None:
            history.add_event(item.event)
        elif bytes.fromhex(item.rollout) not in self.settled:
            self._early.setdefault(item.rollout, []).append(item.event)
            self._num_early += 1
            if self._num_early > _MAX_EARLY:
                self._pop_early(next(iter(self._early)))
        elif 0 < self._last_sequence < item.sequence:
            self.late.append(LateEvent(item.sequence, item.event.kind))

    def _pop_early(self, name: str) -> list[RolloutEvent]:
        events = self._early.pop(name, [])
        self._num_early -= len(events)
        return events


def _find_turn_mask(history: RolloutHistory) -> str:
    if len(history.turns) > MAX_TURNS:
        return "TooManyTurns"
    if not history.main_turns:
        return "OnlySideTurns"
    if all(turn.is_withheld for turn in history.main_turns):
        return "HoldsSecret"
    if history.policy is None:
        return "MixedVersions"
    return history.mask


def _is_rollout(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")
