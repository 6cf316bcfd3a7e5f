"""Tokens are fetched ahead of their step, within a limit, and while a step may have them."""

import threading
import time

import pytest
from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.trainer.contents.objects import read_object, write_object
from etude.trainer.learner import content_spool
from etude.trainer.learner.content_spool import ContentSpool
from etude.v1.rollout_content_pb2 import ContentObject

SIZE = 100


class CountingStore(MemoryStore):
    """Counts reads, and is away while it is told to be."""

    reads = 0
    is_away = False

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads += 1
        if self.is_away:
            raise StoreError("away")
        return super().get_range(key, start, length)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


def write(store: MemoryStore, count: int) -> list[ContentObject]:
    return [write_object(store, f"contents/g/g-{n}", bytes([n]) * SIZE) for n in range(count)]


def test_what_was_fetched_is_read_without_the_store(store: CountingStore) -> None:
    found, spool = write(store, 3), ContentSpool(store)
    spool.fetch(found[:2], steps=1)
    spool.fetch(found[:2], steps=1)
    assert store.reads == 2, "each is fetched once"
    assert spool.count([each.key for each in found]) == 2
    store.is_away = True
    assert [read_object(spool, each)[0] for each in found[:2]] == [0, 1]
    with pytest.raises(StoreError, match="away"):
        read_object(spool, found[2])


def test_what_does_not_fit_is_read_by_its_step_and_room_comes_back(store: CountingStore) -> None:
    found, spool = write(store, 4), ContentSpool(store, limit_bytes=2 * SIZE)
    spool.fetch(found, steps=9)
    assert spool.count([each.key for each in found]) == 2
    assert [read_object(spool, each)[0] for each in found] == [0, 1, 2, 3]
    spool.end_step({found[0].key})
    spool.fetch(found[2:], steps=9)
    assert spool.count([each.key for each in found]) == 2


def test_what_no_later_step_may_have_makes_room(store: CountingStore) -> None:
    found, spool = write(store, 3), ContentSpool(store, limit_bytes=2 * SIZE)
    spool.fetch(found[:1], steps=0)
    spool.fetch(found[1:2], steps=1)
    spool.end_step(())
    assert spool.count([each.key for each in found]) == 1
    spool.end_step(())
    spool.fetch(found, steps=0)
    assert spool.count([each.key for each in found]) == 2


def test_damaged_objects_are_left_to_their_step_and_hold_no_room(store: CountingStore) -> None:
    found, spool = write(store, 2), ContentSpool(store, limit_bytes=SIZE)
    store.objects[found[0].key] = bytes(SIZE - 1)
    spool.fetch(found[:1], steps=1)
    spool.fetch(found[1:], steps=1)
    assert spool.count([each.key for each in found]) == 1
    assert found[1].key in spool._objects


def test_a_store_that_is_away_is_asked_again_until_no_step_may_need_the_object(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, spool = write(store, 2), ContentSpool(store)

    def pause(_seconds: float) -> None:
        if store.reads == 3:
            store.is_away = False

    monkeypatch.setattr(time, "sleep", pause)
    store.is_away = True
    spool.fetch(found[:1], steps=1)
    assert (store.reads, spool.count([found[0].key])) == (4, 1)
    store.is_away = True
    monkeypatch.setattr(time, "sleep", lambda _seconds: spool.end_step(()))
    spool.fetch(found[1:], steps=1)
    assert spool.count([found[1].key]) == 0


def test_a_fetch_that_is_later_than_its_step_reads_nothing(store: CountingStore) -> None:
    found, spool = write(store, 3), ContentSpool(store, limit_bytes=SIZE)
    spool.end_step({each.key for each in found[:2]})
    spool.fetch(found, steps=4)
    assert store.reads == 1
    assert spool.count([found[2].key]) == 1


def test_an_object_whose_step_was_trained_while_it_was_fetched_holds_no_room(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, spool = write(store, 2), ContentSpool(store, limit_bytes=SIZE)
    read = CountingStore.get_range

    def get_range(self: CountingStore, key: str, start: int, length: int) -> bytes:
        if key == found[0].key:
            spool.end_step({key})
        return read(self, key, start, length)

    monkeypatch.setattr(CountingStore, "get_range", get_range)
    spool.fetch(found[:1], steps=4)
    spool.fetch(found[1:], steps=4)
    assert spool.count([each.key for each in found]) == 1
    assert found[1].key in spool._objects


def test_steps_and_fetches_go_on_at_the_same_time_within_the_limit(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_spool, "READS_AT_ONCE", 4)
    found, spool = write(store, 60), ContentSpool(store, limit_bytes=20 * SIZE)

    def fetch_all() -> None:
        for n in range(0, 60, 6):
            spool.fetch(found[n : n + 6], steps=3)

    fetching = threading.Thread(target=fetch_all)
    fetching.start()
    for n in range(0, 60, 6):
        assert [read_object(spool, each)[0] for each in found[n : n + 6]] == list(range(n, n + 6))
        spool.end_step({each.key for each in found[n : n + 6]})
        assert spool._held_bytes <= 20 * SIZE
    fetching.join()
    for _ in range(4):
        spool.end_step(())
    assert (spool._held_bytes, spool._objects) == (0, {})
