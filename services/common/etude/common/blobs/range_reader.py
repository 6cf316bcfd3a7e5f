"""Concurrent range reads: retried one by one, the slowest hedged by a second request."""

import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.blobs import retry_policy
from etude.common.blobs.retry_policy import Timing, TransferLimits
from etude.common.blobs.store import Store
from etude.common.errors import EtudeError


class Range(NamedTuple):
    """Bytes [start, start + length) of one object."""

    key: str
    start: int
    length: int


class RangeAnswer(NamedTuple):
    """A range and exactly its bytes."""

    range: Range
    data: memoryview


@dataclass(slots=True)
class RangeReader:
    """Reads ranges from threads, through the store's synchronous calls.

    Neighbouring ranges are not joined: the caller knows which belong together.
    """

    store: Store
    limits: TransferLimits = field(default_factory=TransferLimits)
    retries: int = 0
    """Attempts that were repeated, over all transfers."""
    hedges: int = 0
    """Second requests for slow ranges, over all transfers."""

    def read(self, ranges: Iterable[Range]) -> Generator[RangeAnswer, None, None]:
        """Each range once, in the order of arrival; a slow one holds up no other.

        Bytes are views of what the client received, not copies. Ranges are taken from the iterable
        as earlier ones are consumed, so at most `pace.at_once` are in memory besides the caller's.

        Raises:
            MissingError: an object is not there.
            StoreRefusedError: the store answered no, or an object is shorter than the range.
            StoreError: a range failed more often than the pace allows.
        """
        # Twice the places: each range may have a second request. A loser keeps its thread until
        # its time limit, hence the spare ones; they are started only when all others are busy.
        pool = ThreadPoolExecutor(4 * self.limits.at_once, thread_name_prefix="range")
        try:
            yield from _Transfer(self, iter(ranges), pool).answers()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, eq=False)
class _Wanted:
    """A range that has no answer yet."""

    range: Range
    failures: int = 0
    attempts: int = 0
    """Attempts that are running now."""
    is_hedged: bool = False
    is_answered: bool = False


class _Attempt(NamedTuple):
    wanted: _Wanted
    began_s: float


class _Received(NamedTuple):
    data: memoryview
    seconds: float


@dataclass(slots=True)
class _Transfer:
    """Asks and waits in the caller's thread; only the store's calls run in the pool."""

    reader: RangeReader
    waiting: Iterator[Range]
    pool: ThreadPoolExecutor
    running: dict[Future[_Received], _Attempt] = field(default_factory=dict)
    resting: list[tuple[float, int, _Wanted]] = field(default_factory=list)
    """Failed ranges and when they are asked for again: a heap by that time."""
    recent: deque[Timing] = field(default_factory=lambda: deque(maxlen=retry_policy.RECENT))
    asked: int = 0
    open: int = 0
    """Ranges asked for and not answered."""
    retries: int = 0
    hedges: int = 0
    _ties: Iterator[int] = field(default_factory=itertools.count)

    def answers(self) -> Iterator[RangeAnswer]:
        self._ask_more()
        while self.open:
            for future in self._wait_for_attempts():
                answer = self._take_answer(future)
                if answer is not None:
                    yield answer
            self._ask_again()
            self._ask_twice()
            self._ask_more()

    def _ask_more(self) -> None:
        for range_ in itertools.islice(self.waiting, self.reader.limits.at_once - self.open):
            self.open += 1
            self.asked += 1
            self._ask(_Wanted(range_))

    def _ask_again(self) -> None:
        while self.resting and self.resting[0][0] <= time.monotonic():
            self._ask(heapq.heappop(self.resting)[2])

    def _ask_twice(self) -> None:
        now_s = time.monotonic()
        slow = [each for each, due_s in self._hedges_due() if due_s <= now_s]
        for wanted in slow:
            if retry_policy.may_hedge(
                hedges=self.hedges, asked=self.asked, pace=self.reader.limits
            ):
                wanted.is_hedged = True
                self.hedges += 1
                self.reader.hedges += 1
                self._ask(wanted)

    def _ask(self, wanted: _Wanted) -> None:
        wanted.attempts += 1
        future = self.pool.submit(_received, self.reader.store, wanted.range)
        self.running[future] = _Attempt(wanted, time.monotonic())

    def _hedges_due(self) -> Iterator[tuple[_Wanted, float]]:
        """Ranges that may get a second request, and when."""
        if not retry_policy.may_hedge(
            hedges=self.hedges, asked=self.asked, pace=self.reader.limits
        ):
            return
        for future, (wanted, began_s) in self.running.items():
            if wanted.is_hedged or wanted.is_answered or future.done():
                continue
            after_s = retry_policy.hedge_after_s(self.recent, wanted.range.length)
            if after_s is not None:
                yield wanted, began_s + after_s

    def _wait_for_attempts(self) -> list[Future[_Received]]:
        """Attempts that ended, after waiting until one did or there is something else to do."""
        due_s = [at_s for at_s, _, _ in self.resting[:1]]
        due_s += [at_s for _, at_s in self._hedges_due()]
        patience_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        if not self.running:
            time.sleep(patience_s or 0.0)
            return []
        return list(wait(self.running, patience_s, FIRST_COMPLETED).done)

    def _take_answer(self, future: Future[_Received]) -> RangeAnswer | None:
        """The answer, if this attempt was the first to bring it.

        Raises:
            EtudeError: it failed, and is not repeated.
        """
        wanted = self.running.pop(future).wanted
        wanted.attempts -= 1
        if wanted.is_answered:
            return None
        try:
            data, seconds = future.result()
        except EtudeError as error:
            self._failed(wanted, error)
            return None
        self.recent.append(Timing(wanted.range.length, seconds))
        wanted.is_answered = True
        self.open -= 1
        return RangeAnswer(wanted.range, data)

    def _failed(self, wanted: _Wanted, error: EtudeError) -> None:
        wanted.failures += 1
        if not retry_policy.may_retry(
            error, failures=wanted.failures, retries=self.retries, pace=self.reader.limits
        ):
            raise error
        if wanted.attempts:  # its twin may still answer
            return
        self.retries += 1
        self.reader.retries += 1
        pause_s = retry_policy.pause_s(wanted.failures, random.random())  # noqa: S311 - jitter
        heapq.heappush(self.resting, (time.monotonic() + pause_s, next(self._ties), wanted))


def _received(store: Store, range_: Range) -> _Received:
    # Timed here: the caller may take its time before it looks at an answer.
    began_s = time.monotonic()
    data = store.view(*range_)
    return _Received(data, time.monotonic() - began_s)
