"""Log of a route's releases: decides, stores the decision, and appends to the channels."""

import contextlib
import logging
import threading
from dataclasses import dataclass, field

from blake3 import blake3

from etude.common.blobs import MissingError, Store
from etude.common.errors import FencedError, ReusedIdError
from etude.common.experiments.assignment import BUCKETS
from etude.common.release.channels import (
    CANARY,
    STABLE,
    ChannelRecord,
    append_record,
    newest_record,
)
from etude.feedback import metrics
from etude.feedback.release.decide import adopt_stable, decide
from etude.feedback.release.decision import DecisionCase, ReleaseAction, ReleaseDecision
from etude.feedback.release.evidence import Evidence, Request
from etude.feedback.release.records import (
    MAX_REQUESTS,
    RELEASES,
    AnsweredRequest,
    ReleaseRecord,
    channel_records,
    create_evidence,
    create_release,
    newest_release,
    read_release,
    release_key,
)
from etude.feedback.release.rules import ReleaseRules
from etude.feedback.release.state import ReleaseState

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReleaseLog:
    """Decisions of one service. Methods block, and may be called from several threads."""

    store: Store
    rules: ReleaseRules
    state: ReleaseState
    newest: ReleaseRecord | None
    """Newest decision; None before the first."""
    _channels: dict[str, ChannelRecord | None]
    """Newest record of each channel."""
    _pending: tuple[ChannelRecord, ...] = ()
    """Records of the newest decision that may not be in their channels yet."""
    _unconfirmed: ReleaseRecord | None = None
    """A decision of which the store did not say whether it stands."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, store: Store, rules: ReleaseRules) -> "ReleaseLog":
        """Read the newest decision and the channels, and finish what an earlier service began.

        A version that was made the stable one by hand, while no service ran, stays.

        Raises:
            CorruptError: a record is damaged.
            FencedError: another service decides for this route.
            StoreError: the store did not answer.
        """
        for action in ReleaseAction:  # a counter that begins at 1 shows no increase
            metrics.DECISIONS.labels(action.value)
        newest = newest_release(store)
        state = newest.state if newest else ReleaseState()
        opened = cls(store, rules, state, newest, {}, newest.channels if newest else ())
        # A record by hand may have the number of one that an earlier service did not append.
        with contextlib.suppress(FencedError):
            opened._finish()
        opened._pending = ()
        opened._channels = {name: newest_record(store, name) for name in (STABLE, CANARY)}
        stable = opened._channels[STABLE]
        if stable is not None and stable.served != state.stable:
            opened._store(adopt_stable(state, stable), now_ms=stable.decided_ms, entry=None)
        opened._report()
        return opened

    def answer(self, request_id: str, request: Request, *, now_ms: int) -> ReleaseRecord:
        """Decide about a request, once: the same id gives the same answer.

        Raises:
            ReusedIdError: the id is that of another request.
            FencedError: another service decides for this route.
            StoreError: the store did not answer; ask again.
        """
        text = f"{type(request).__name__} {request.model_dump_json()}"
        digest = blake3(text.encode()).hexdigest()
        with self._lock:
            self._commit()
            known = self.newest.requests if self.newest else ()
            found = next((each for each in known if each.id == request_id), None)
            if found is None:
                entry = AnsweredRequest(id=request_id, digest=digest, number=self._next_number)
                now_ms, decision = self._decide(request, now_ms=now_ms)
                return self._store(decision, now_ms=now_ms, entry=entry)
            if found.digest != digest:
                raise ReusedIdError(f"request {request_id} had other content")
            self._finish()
            return read_release(self.store, found.number)

    def observe(self, evidence: Evidence, *, now_ms: int) -> None:
        """Decide about a look or about findings; nothing is stored if nothing changes.

        Raises:
            FencedError: another service decides for this route.
            StoreError: the store did not answer; the next pass goes on.
        """
        with self._lock:
            now_ms, decision = self._decide(evidence, now_ms=now_ms)
            if decision.state != self.state:
                self._store(decision, now_ms=now_ms, entry=None)

    def check_alone(self) -> None:
        """Check that no other service decides for this route.

        Raises:
            FencedError: one does.
            StoreError: the store did not answer.
        """
        with self._lock:
            self._commit()
            known = release_key(self.newest.number) if self.newest else ""
            for info in self.store.list(RELEASES, after=known):
                raise FencedError(f"{info.key} is another service's decision about this route")

    def describe(self) -> DecisionCase:
        """State and rules as they are now."""
        return DecisionCase(state=self.state, rules=self.rules, now_ms=0, evidence={})

    def read_newest(self, limit: int) -> list[ReleaseRecord]:
        """Newest decisions, the newest first.

        Raises:
            CorruptError: one is damaged.
            StoreError: the store did not answer.
        """
        found = []
        for number in range(self._next_number - 1, max(0, self._next_number - 1 - limit), -1):
            try:
                found.append(read_release(self.store, number))
            except MissingError:
                break
        return found

    @property
    def _next_number(self) -> int:
        return self.newest.number + 1 if self.newest else 1

    def _decide(self, evidence: Evidence, *, now_ms: int) -> tuple[int, ReleaseDecision]:
        """Decide, and return the time of it."""
        self._finish()
        # Each decision is later than the one before, also where the clock was set back.
        now_ms = max(now_ms, self.newest.decided_ms + 1 if self.newest else 0)
        return now_ms, decide(self.state, evidence, self.rules, now_ms=now_ms)

    def _store(
        self, decision: ReleaseDecision, *, now_ms: int, entry: AnsweredRequest | None
    ) -> ReleaseRecord:
        """Store a decision, and change the channels by it.

        Raises:
            FencedError: another service decides for this route.
            StoreError: the store did not answer; the decision may stand.
        """
        known = self.newest.requests if self.newest else ()
        record = ReleaseRecord(
            number=self._next_number,
            action=decision.action.value,
            sentence=decision.sentence,
            evidence=create_evidence(self.store, decision, decided_ms=now_ms),
            decided_ms=now_ms,
            state=decision.state,
            requests=(*known, *((entry,) if entry else ()))[-MAX_REQUESTS:],
        )
        channels = channel_records(
            record, stable=self._channels[STABLE], canary=self._channels[CANARY]
        )
        record = record.model_copy(update={"channels": channels})
        self._unconfirmed = record
        self._finish()
        return record

    def _commit(self) -> None:
        """Create the decision that may stand already, and take its state.

        Raises:
            FencedError: another service decided instead.
            StoreError: the store did not answer; it may stand.
        """
        record = self._unconfirmed
        if record is None:
            return
        if create_release(self.store, record) != record:
            raise FencedError(f"decision {record.number} of this route is another service's")
        self.newest, self.state, self._pending = record, record.state, record.channels
        self._unconfirmed = None
        log.info("release: %s: %s", record.action, record.sentence)
        metrics.DECISIONS.labels(record.action).inc()
        self._report()

    def _finish(self) -> None:
        """Commit the newest decision, and append what it holds for the channels.

        Raises:
            FencedError: another service appended other records.
            StoreError: the store did not answer.
        """
        self._commit()
        while self._pending:
            record = self._pending[0]
            if append_record(self.store, record) != record:
                what = f"record {record.number} of channel {record.channel} is another service's"
                raise FencedError(what)
            self._channels[record.channel] = record
            self._pending = self._pending[1:]

    def _report(self) -> None:
        canary = self.state.canary
        metrics.CANARY_SHARE.set(canary.share / BUCKETS if canary else 0)
        is_asked = canary is not None and bool(canary.question or canary.gain)
        metrics.RELEASE_WAITS.set(is_asked)
        metrics.RELEASE_FROZEN.set(bool(self.describe().freeze))
