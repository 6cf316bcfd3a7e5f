"""A process's view of the store, through faults of chance that it writes down."""

import random
import time
from dataclasses import dataclass, field

from tests.harness.chaos.journal import Journal
from tests.harness.chaos.settings import Settings
from tests.support.stores.store_faults import Fault, FaultyStore, Schedule
from typing_extensions import Buffer, override

from etude.common.blobs import MissingError, Store
from etude.common.errors import StoreError
from etude.common.weights.protocol.versions import DELTAS, EPOCHS, KEYFRAMES, LEASES, SKIPS

PAYLOADS = (DELTAS, KEYFRAMES, SKIPS)

FLIP_PAYLOAD = 0.02
FLIP_RECORD = 0.004
LOSE_REPLY = 0.07
TEAR = 0.025
BURST = 0.0008
BURST_CALLS = 5
"""Calls in a row that are answered with 503."""

LEASE_S = 4.0
"""A lease that was not written for so long may be ignored by the greedy collector."""


class Chances(Schedule):
    """Faults by what a call does; each is written down, and so is that its victim looked again."""

    def __init__(self, settings: Settings, journal: Journal, seed: str) -> None:
        super().__init__(seed=0)
        self._settings = settings
        self._journal = journal
        self._random = random.Random(seed)
        self._burst = 0
        self._unseen: dict[str, str] = {}
        self._looked_at = 0.0
        self._is_calm = self._is_stopped = False

    @override
    def next(self, call: str, key: str) -> Fault | None:
        with self._lock:
            self._look()
            # Another call for the same key: the victim noticed.
            if key in self._unseen:
                self._journal.write("seen", fault=self._unseen.pop(key))
            if self._is_stopped:
                return Fault.UNAVAILABLE
            if self._is_calm:
                return None
            return self._drawn(call, key)

    def tears(self, key: str) -> bool:
        """Whether this upload breaks off in the middle."""
        with self._lock:
            if self._is_calm or key.startswith(LEASES) or self._random.random() >= TEAR:
                return False
            self._met("torn upload", key)
            return True

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at > 0.02:
            self._looked_at = now
            self._is_calm = self._settings.calm.exists()
            self._is_stopped = self._settings.down.exists()

    def _drawn(self, call: str, key: str) -> Fault | None:
        if self._burst:
            self._burst -= 1
            return Fault.UNAVAILABLE
        point = self._random.random()
        if point < BURST:
            self._burst = BURST_CALLS
            self._met("503 burst", key)
            return Fault.UNAVAILABLE
        if call == "create" and point < LOSE_REPLY:
            self._met("lost reply", key)
            return Fault.LOST_REPLY
        if call in {"get", "get_range", "view"}:
            is_payload = key.startswith(PAYLOADS) and not key.endswith(".json")
            if point < (FLIP_PAYLOAD if is_payload else FLIP_RECORD):
                self._met(f"bit flip in a {'payload' if is_payload else 'record'}", key)
                return Fault.FLIPPED
        return None

    def _met(self, fault: str, key: str) -> None:
        self._unseen[key] = fault
        self._journal.write("fault", fault=fault)


@dataclass(slots=True)
class ChaosStore(FaultyStore):
    """The store of one process."""

    journal: Journal = field(kw_only=True)
    asked: dict[int, float] = field(default_factory=dict)
    """When the process last began to ask whether an epoch is open."""
    leased_at: float = 0.0

    @override
    def put(self, key: str, data: Buffer) -> None:
        if isinstance(self.faults, Chances) and self.faults.tears(key):
            torn = bytes(data)
            self.inner.put(key, torn[: len(torn) // 2])
            raise StoreError(f"{self.url}/{key}: the connection broke in the middle of the upload")
        super(ChaosStore, self).put(key, data)
        if key.startswith(LEASES):
            self.leased_at = time.monotonic()

    @override
    def head(self, key: str):
        if key.startswith(EPOCHS):
            self.asked[int(key[len(EPOCHS) :].removesuffix(".json"))] = time.monotonic()
        return super(ChaosStore, self).head(key)

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        try:
            return super(ChaosStore, self).view(key, start, length)
        except MissingError:
            is_leased = time.monotonic() - self.leased_at < LEASE_S
            self.journal.write("vanished", key=key, is_leased=is_leased)
            raise


def faulty(settings: Settings, who: str, journal: Journal) -> ChaosStore:
    """The store as one process sees it; the same seed and process give the same chances."""
    chances = Chances(settings, journal, f"{settings.seed}/{who}")
    inner: Store = settings.raw_store()
    return ChaosStore(inner, chances, journal=journal)
