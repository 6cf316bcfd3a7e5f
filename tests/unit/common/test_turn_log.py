"""Turn log: what is durable is whole, in order, and stays while the store is away."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.common.turns import turn_log
from etude.common.turns.turn_log import TurnLog, read_turns
from etude.v1.turns_pb2 import TurnRecord, TurnSegment


@dataclass(slots=True)
class AwayStore(MemoryStore):
    """Is away for some creates, and loses the replies of others."""

    refusals: int = 0
    lost_replies: int = 0
    keys: list[str] = field(default_factory=list)

    @override
    def create(self, key: str, data: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreError("away")
        MemoryStore.create(self, key, data)
        self.keys.append(key)
        if self.lost_replies:
            self.lost_replies -= 1
            raise StoreError("no reply")


def turn(number: int, size: int = 1) -> TurnRecord:
    return TurnRecord(turn_id=str(number), token_ids=range(size))


async def write(log: TurnLog, *turns: TurnRecord) -> list[bool]:
    writing = asyncio.create_task(log.run())
    queued = []
    for each in turns:
        queued.append(log.append(each))
        await asyncio.sleep(0)
    log.close()
    await writing
    return queued


def numbers(store: MemoryStore) -> list[str]:
    return [each.turn_id for each in read_turns(store)]


async def test_turns_are_read_back_in_the_order_of_their_writer() -> None:
    store = MemoryStore()
    durable: list[int] = []
    log = TurnLog(store, 1 << 20, note_durable=durable.append)
    assert await write(log, *map(turn, range(5))) == [True] * 5
    assert numbers(store) == ["0", "1", "2", "3", "4"]
    assert (sum(durable), log.waiting_bytes) == (5, 0)


async def test_two_writers_never_meet() -> None:
    store = MemoryStore()
    for _ in range(2):
        await write(TurnLog(store, 1 << 20), turn(1), turn(2))
    assert sorted(numbers(store)) == ["1", "1", "2", "2"]


async def test_a_store_that_is_away_or_loses_replies_gets_each_turn_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turn_log, "RETRY_S", 0.0)
    store = AwayStore(refusals=2, lost_replies=1)
    await write(TurnLog(store, 1 << 20), turn(1), turn(2))
    assert numbers(store) == ["1", "2"]


async def test_turns_beyond_the_bound_are_refused_and_leave_no_gap() -> None:
    store = MemoryStore()
    log = TurnLog(store, turn(1, 300).ByteSize() * 2)
    assert [log.append(turn(number, 300)) for number in range(3)] == [True, True, False]
    await write(log)
    assert numbers(store) == ["0", "1"]


async def test_many_turns_are_split_over_objects_that_join() -> None:
    store = AwayStore()
    log = TurnLog(store, 64 << 20)
    size = 1 << 20
    await write(log, *(turn(number, size) for number in range(6)))
    assert len(store.keys) > 1
    assert numbers(store) == [str(number) for number in range(6)]


async def test_a_damaged_missing_or_foreign_object_is_refused() -> None:
    store = AwayStore()
    log = TurnLog(store, 1 << 20)
    await write(log, turn(1))
    (key,) = store.keys
    data = store.objects[key]
    for broken in (data[:-3], data[:10] + bytes([data[10] ^ 1]) + data[11:], b"", b"ETWL"):
        store.objects[key] = broken
        with pytest.raises(CorruptError, match=key):
            numbers(store)
    store.objects = {key.replace("000000000000", "000000000007"): data}
    with pytest.raises(CorruptError):
        numbers(store)


async def test_another_writer_under_the_same_name_ends_this_one() -> None:
    store = MemoryStore()
    await write(TurnLog(store, 1 << 20, writer="w"), turn(1))
    with pytest.raises(FencedError, match="another process"):
        await write(TurnLog(store, 1 << 20, writer="w"), turn(2))


@dataclass(slots=True)
class DatedStore(MemoryStore):
    """Has a clock that is set, and acts before a call."""

    now_s: float = 1_000.0
    act: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.clock = lambda: self.now_s

    @override
    def get(self, key: str) -> bytes:
        self.act()
        return MemoryStore.get(self, key)


async def test_of_each_writer_the_turns_from_before_a_time_are_removed() -> None:
    store = DatedStore()
    first, second = TurnLog(store, 1 << 20, writer="a"), TurnLog(store, 1 << 20, writer="b")
    await write(first, turn(1), turn(2))
    store.now_s = 2_000.0
    await write(second, turn(3))
    assert turn_log.remove_turns(store, before_ms=1_000_000) == 0
    assert turn_log.read_removed_ms(store) == 0  # nothing was
    assert turn_log.remove_turns(store, before_ms=1_000_001) == 1
    assert (numbers(store), turn_log.read_removed_ms(store)) == (["3"], 1_000_001)
    assert turn_log.remove_turns(store, before_ms=3_000_000) == 1
    assert [info.key for info in store.list("")] == ["removed-turns/000000003000000"]


async def test_an_object_that_an_adjusted_clock_made_older_is_removed_in_its_order() -> None:
    store = DatedStore()
    for first, now_s in enumerate((3_000.0, 2_000.0, 4_000.0)):
        store.now_s = now_s
        segment = TurnSegment(writer="w", first=first, turns=[turn(first)])
        store.create(turn_log.segment_key("w", first), turn_log.encode_segment(segment))
    assert turn_log.remove_turns(store, before_ms=2_500_000) == 0
    assert numbers(store) == ["0", "1", "2"]
    assert turn_log.remove_turns(store, before_ms=3_500_000) == 2
    assert numbers(store) == ["2"]


async def test_a_reader_whose_turns_are_removed_meanwhile_goes_on_with_the_next() -> None:
    store = DatedStore()
    for first in range(4):
        store.now_s = 1_000.0 + first
        segment = TurnSegment(writer="w", first=first, turns=[turn(first)])
        store.create(turn_log.segment_key("w", first), turn_log.encode_segment(segment))
    reader = read_turns(store)
    assert next(reader).turn_id == "0"
    assert turn_log.remove_turns(store, before_ms=1_002_001) == 3
    assert [each.turn_id for each in reader] == ["3"]


async def test_an_object_that_is_missing_and_was_not_removed_is_reported() -> None:
    store = DatedStore()
    await write(TurnLog(store, 1 << 20, writer="w"), turn(1))
    store.act = lambda: store.delete([turn_log.segment_key("w", 0)])
    with pytest.raises(CorruptError, match="missing"):
        numbers(store)
