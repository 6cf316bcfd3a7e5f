"""Faults of an object store: which call is hit, and a store that is hit by them."""

import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from typing_extensions import Buffer, override

from etude.common.blobs import DeniedError, ObjectInfo, Store
from etude.common.errors import StoreError

T = TypeVar("T")


class Fault(StrEnum):
    """What goes wrong with one call."""

    UNAVAILABLE = "the store answers 503 and does nothing"
    RESET = "the connection breaks before the store has read the call"
    SLOW = "the call takes long"
    LOST_REPLY = "the call takes effect, and its answer is lost"
    CUT = "the connection breaks in the middle of the answer"
    DENIED = "the credentials are refused"
    FLIPPED = "one bit of what is read is wrong"


class Schedule:
    """Which call meets which fault; the same seed, rates and calls give the same faults.

    Faults that were pushed come first, one per matching call; then chance decides.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        hits: Callable[[str, str], bool] = lambda _call, _key: True,
    ) -> None:
        self.met: Counter[tuple[str, Fault]] = Counter()
        """How often each call met each fault."""
        self._chance = random.Random(seed)
        self._rates = dict(rates or {})
        self._hits = hits
        self._pushed: list[Fault | None] = []
        self._is_down = False
        self._lock = threading.Lock()

    def push(self, *faults: Fault | None) -> None:
        """Faults of the next matching calls; None lets one pass."""
        with self._lock:
            self._pushed += faults

    def clear(self) -> None:
        """Forget what was pushed and has not been met."""
        with self._lock:
            self._pushed.clear()

    def down(self, *, is_down: bool) -> None:
        """From now on every call is UNAVAILABLE, or none is."""
        self._is_down = is_down

    def next(self, call: str, key: str) -> Fault | None:
        """The fault of this call."""
        with self._lock:
            if not self._hits(call, key):
                return None
            fault = self._decided()
            if fault is not None:
                self.met[call, fault] += 1
            return fault

    def _decided(self) -> Fault | None:
        if self._is_down:
            return Fault.UNAVAILABLE
        if self._pushed:
            return self._pushed.pop(0)
        point = self._chance.random()
        for fault, rate in self._rates.items():
            if point < rate:
                return fault
            point -= rate
        return None


@dataclass(slots=True)
class FaultyStore(Store):
    """Another store, seen through faults; for what stands above the client's own retries."""

    inner: Store
    faults: Schedule
    slow_s: float = 0.05
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = self.inner.url

    @override
    def get(self, key: str) -> bytes:
        return self._read("get", key, lambda: self.inner.get(key))

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._read("get_range", key, lambda: self.inner.get_range(key, start, length))

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        work = lambda: bytes(self.inner.view(key, start, length))  # noqa: E731 - one thing, named
        return memoryview(self._read("view", key, work))

    @override
    def put(self, key: str, data: Buffer) -> None:
        self._call("put", key, lambda: self.inner.put(key, data))

    @override
    def create(self, key: str, data: bytes) -> None:
        self._call("create", key, lambda: self.inner.create(key, data))

    @override
    def head(self, key: str) -> ObjectInfo | None:
        return self._call("head", key, lambda: self.inner.head(key))[0]

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        yield from self._call("list", prefix, lambda: [*self.inner.list(prefix, after)])[0]

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._call("delete", key, lambda: self.inner.delete([key]))  # noqa: B023 - called now

    def _read(self, call: str, key: str, work: Callable[[], bytes]) -> bytes:
        data, fault = self._call(call, key, work)
        if fault is Fault.FLIPPED and data:
            at = zlib.crc32(key.encode()) % len(data)
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    def _call(self, call: str, key: str, work: Callable[[], T]) -> tuple[T, Fault | None]:
        fault = self.faults.next(call, key)
        where = f"{self.url}/{key}"
        match fault:
            case Fault.UNAVAILABLE | Fault.RESET:
                raise StoreError(f"{where}: {fault}")
            case Fault.DENIED:
                raise DeniedError(f"{where}: {fault}")
            case Fault.LOST_REPLY | Fault.CUT:
                work()
                raise StoreError(f"{where}: {fault}")
            case Fault.SLOW:
                time.sleep(self.slow_s)
            case Fault.FLIPPED | None:
                pass
        return work(), fault
