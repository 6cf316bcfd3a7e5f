"""Outcomes of rollouts by day: measured again until nothing can change them, then left alone.

The rollouts of one day are measured together, so that the figures of censoring are the day's own.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from blake3 import blake3

from etude.common.blobs import Store
from etude.common.feedback.tables import PREFIX, PartPlace
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.registry import measure_arms
from etude.feedback.tables.parts import TableParts, day_of, encode_rows
from etude.feedback.tables.rows import outcome_rows
from etude.feedback.tables.schema import OUTCOMES
from etude.feedback.windows.settings import WindowRules

_NAME = "outcomes"
_DAY_MS = 86_400_000
_CLOCKS_MS = 300_000
"""Difference between the clocks of the store, of a gateway and of this service."""


@dataclass(slots=True)
class OutcomeDays:
    """The table of outcomes; the methods block, and belong to one thread."""

    store: Store
    rules: WindowRules
    final: set[str] = field(default_factory=set, init=False)
    """Days whose outcomes are stored and do not change."""
    _open: set[str] = field(default_factory=set, init=False)
    """Other days of which a part is stored."""
    _written: dict[str, bytes] = field(default_factory=dict, init=False)
    """Digest of the newest part of an open day."""

    def __post_init__(self) -> None:
        for info in self.store.list(f"{PREFIX}{_NAME}/"):
            place = PartPlace.parse(info.key)
            if place is not None:
                is_final = self._is_over(place.day, int(1_000 * info.modified_s))
                (self.final if is_final else self._open).add(place.day)

    def write(self, histories: Iterable[RolloutHistory], *, now_ms: int) -> list[str]:
        """Measure the rollouts of open days, and store what changed.

        Args:
            histories: of rollouts that may be used.
            now_ms: time of the server.

        Returns:
            Rollouts whose outcomes are final.

        Raises:
            StoreError: the store did not answer; the call may be repeated.
        """
        days: dict[str, list[RolloutHistory]] = defaultdict(list)
        for history in histories:
            days[day_of(1_000 * history.started_ms)].append(history)
        for day in sorted((days.keys() | self._open) - self.final):
            self._write_day(day, days[day], now_ms)
        return [each.rollout for day in self.final & days.keys() for each in days[day]]

    def drop_users(self, users: Collection[UserId]) -> None:
        """Remove the outcomes of users from final days; those of open days are measured again.

        Raises:
            CorruptError: a part is damaged.
            StoreError: the store did not answer; the call may be repeated.
        """
        TableParts(self.store, _NAME, OUTCOMES).drop_users(users, days=self.final)

    def _write_day(self, day: str, histories: list[RolloutHistory], now_ms: int) -> None:
        outcomes = measure_arms(histories, horizon_s=self.rules.horizon_s, now_ms=now_ms)
        data = encode_rows([row for each in outcomes for row in outcome_rows(each)], OUTCOMES)
        digest = blake3(data).digest()
        is_over = self._is_over(day, now_ms)
        # Stored again once the day is over: by the time of the object, it is known to be final.
        if is_over or self._written.get(day) != digest:
            self.store.put(PartPlace(_NAME, day).key, data)
            self._written[day] = digest
            self._open.add(day)
        if is_over:
            self.final.add(day)
            self._open.discard(day)

    def _is_over(self, day: str, at_ms: int) -> bool:
        """Return true if all rollouts of a day are settled at a time, by each of the clocks."""
        end_ms = int(1_000 * datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) + _DAY_MS
        return at_ms >= self.rules.settled_by_ms(end_ms) + _CLOCKS_MS
