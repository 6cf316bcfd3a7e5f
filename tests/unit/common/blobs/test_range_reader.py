"""Many ranges at once, from stores that fail, stall and answer late."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stores.store_faults import Fault, FaultyStore, Schedule
from typing_extensions import override

from etude.common.blobs import (
    DeniedError,
    MemoryStore,
    MissingError,
    Range,
    RangeReader,
    ShortReadError,
    Store,
    TransferLimits,
)
from etude.common.errors import StoreError

CONTENT = bytes(n * 31 % 251 for n in range(5_000))


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    store.put("blob", CONTENT)
    return store


def pieces(length: int) -> list[Range]:
    return [
        Range("blob", start, min(length, len(CONTENT) - start))
        for start in range(0, len(CONTENT), length)
    ]


@settings(max_examples=40)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 4_999), st.integers(0, 400)), max_size=60),
    at_once=st.integers(1, 8),
    seed=st.integers(0, 1_000),
)
def test_every_range_is_answered_once_and_exactly_whatever_fails_meanwhile(
    cuts: list[tuple[int, int]], at_once: int, seed: int
) -> None:
    inner = MemoryStore(objects={"blob": CONTENT})
    faults = Schedule(seed=seed, rates={Fault.UNAVAILABLE: 0.05, Fault.LOST_REPLY: 0.05})
    ranges = [Range("blob", start, min(length, 5_000 - start)) for start, length in cuts]
    pace = TransferLimits(at_once=at_once, retries_per_range=60, retries_per_transfer=600)
    answers = list(RangeReader(FaultyStore(inner, faults), pace).read(ranges))
    assert Counter(each.range for each in answers) == Counter(ranges)
    for (_, start, length), data in answers:
        assert bytes(data) == CONTENT[start : start + length]


def test_a_503_burst_costs_retries_and_no_answer(store: MemoryStore) -> None:
    faults = Schedule()
    faults.push(*[Fault.UNAVAILABLE] * 12)
    reader = RangeReader(FaultyStore(store, faults), TransferLimits(at_once=4))
    assert len(list(reader.read(pieces(100)))) == 50
    assert reader.retries == 12


def test_a_store_that_stays_away_is_left_alone_after_the_budget(store: MemoryStore) -> None:
    faults = Schedule()
    faults.down(is_down=True)
    reader = RangeReader(
        FaultyStore(store, faults), TransferLimits(at_once=4, retries_per_transfer=6)
    )
    with pytest.raises(StoreError, match="503"):
        list(reader.read(pieces(100)))
    assert reader.retries == 6


@pytest.mark.parametrize(
    ("range_", "error"),
    [
        (Range("absent", 0, 5), MissingError),
        (Range("blob", 4_990, 20), ShortReadError),
    ],
)
def test_an_answer_that_is_no_is_passed_on_at_once(
    store: MemoryStore, range_: Range, error: type[Exception]
) -> None:
    reader = RangeReader(store)
    with pytest.raises(error):
        list(reader.read([*pieces(1_000), range_]))
    assert reader.retries == 0


def test_refused_credentials_are_not_tried_again(store: MemoryStore) -> None:
    faults = Schedule()
    faults.push(Fault.DENIED)
    reader = RangeReader(FaultyStore(store, faults))
    with pytest.raises(DeniedError):
        list(reader.read(pieces(1_000)))
    assert reader.retries == 0


@dataclass
class Stalls(MemoryStore):
    """The first request for one range hangs until it is released."""

    stalled: Range | None = None
    release: threading.Event = field(default_factory=threading.Event)
    seen: Counter[Range] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        range_ = Range(key, start, length)
        with self.lock:
            self.seen[range_] += 1
            is_first = self.seen[range_] == 1
        if range_ == self.stalled and is_first:
            assert self.release.wait(60), "nobody asked a second time"
        return MemoryStore.view(self, key, start, length)


def test_a_range_that_hangs_is_asked_for_again_and_the_first_answer_wins() -> None:
    ranges = pieces(100)
    store = Stalls(objects={"blob": CONTENT}, stalled=ranges[30])
    # A busy machine may make others look slow: they must not use up the second requests.
    reader = RangeReader(store, TransferLimits(at_once=4, hedges_per_range_asked=1))
    try:
        answers = list(reader.read(ranges))  # would wait for ever without a second request
    finally:
        store.release.set()
    assert sorted(each.range for each in answers) == ranges
    assert store.seen[ranges[30]] == 2
    assert reader.hedges >= 1


def test_a_range_that_hangs_holds_up_no_other() -> None:
    ranges = pieces(100)
    store = Stalls(objects={"blob": CONTENT}, stalled=ranges[0])
    reading = RangeReader(store, TransferLimits(at_once=4, hedges_per_range_asked=0)).read(ranges)
    try:
        first = [next(reading).range for _ in range(10)]
        assert ranges[0] not in first
    finally:
        store.release.set()
    assert sorted([*first, *(each.range for each in reading)]) == ranges


def test_a_failed_twin_does_not_take_the_other_one_along() -> None:
    """The second request fails while the first is on its way: the first still counts."""
    ranges = pieces(100)
    both_asked = threading.Event()

    class SecondFails(Stalls):
        @override
        def view(self, key: str, start: int, length: int) -> memoryview:
            if Range(key, start, length) == self.stalled and self.seen[self.stalled] == 1:
                self.seen[self.stalled] += 1
                both_asked.set()
                self.release.set()
                raise StoreError("503")
            return Stalls.view(self, key, start, length)

    store = SecondFails(objects={"blob": CONTENT}, stalled=ranges[30])
    reader = RangeReader(store, TransferLimits(at_once=4, hedges_per_range_asked=1))
    assert len(list(reader.read(ranges))) == len(ranges)
    assert both_asked.is_set()
    assert reader.retries == 0


def test_no_more_is_asked_for_than_the_caller_has_room_for(store: MemoryStore) -> None:
    taken = 0

    def ranges() -> Iterator[Range]:
        nonlocal taken
        for range_ in pieces(100):
            taken += 1
            yield range_

    reading = RangeReader(store, TransferLimits(at_once=3)).read(ranges())
    for consumed in range(1, 20):
        next(reading)
        assert taken <= consumed + 3
    reading.close()


def test_a_reader_that_is_left_early_leaves_no_thread_working(store: MemoryStore) -> None:
    reading = RangeReader(store, TransferLimits(at_once=3)).read(pieces(10))
    next(reading)
    reading.close()
    for thread in threading.enumerate():
        if thread.name.startswith("range"):
            thread.join(30)
            assert not thread.is_alive()


def test_ranges_of_any_store_are_read_alike(any_store: Store) -> None:
    any_store.put("blob", CONTENT)
    answers = RangeReader(any_store).read(pieces(97))
    assert b"".join(bytes(a.data) for a in sorted(answers, key=lambda a: a.range)) == CONTENT
