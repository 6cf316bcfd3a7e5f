"""The probe names the promise that a store breaks, and what to change."""

from collections.abc import Iterator

import pytest
from tests.support.stores.store_faults import Fault, FaultyStore, Schedule
from typing_extensions import Buffer, override

from etude.common.blobs import MemoryStore, MissingError, ObjectInfo, StoreRefusedError, probe
from etude.common.blobs.conformance import check_promises
from etude.common.errors import StoreError


class Overwrites(MemoryStore):
    """Takes no notice of the condition of a create."""

    @override
    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


class IgnoresRanges(MemoryStore):
    """Answers with the beginning, whatever was asked for."""

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.objects[key][:length]


class ListsLate(MemoryStore):
    """Shows no new object."""

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return iter(())


class Remembers(MemoryStore):
    """A cache answers for an object that is gone."""

    @override
    def get(self, key: str) -> bytes:
        try:
            return MemoryStore.get(self, key)
        except MissingError:
            return b"etude"


class ReadsOld(MemoryStore):
    """An overwrite is seen late."""

    @override
    def put(self, key: str, data: Buffer) -> None:
        if key not in self.objects:
            MemoryStore.put(self, key, data)


class EverybodyWins(MemoryStore):
    """Looks and writes in two steps, as creators of one key notice."""

    @override
    def create(self, key: str, data: bytes) -> None:
        if key.endswith("-raced"):
            self.put(key, data)
        else:
            MemoryStore.create(self, key, data)


@pytest.mark.parametrize(
    ("store", "call", "words"),
    [
        (Overwrites(), "create again", "conditional puts"),
        (IgnoresRanges(), "get_range", "ranged reads"),
        (ListsLate(), "list", "read-after-write"),
        (Remembers(), "delete", "no cache"),
        (ReadsOld(), "put", "read-after-write"),
        (EverybodyWins(), "create at once", "conditional puts"),
    ],
)
def test_each_broken_promise_is_named_with_its_call_and_the_way_out(
    store: MemoryStore, call: str, words: str
) -> None:
    *kept, broken = check_promises(store)
    assert all(not verdict.trouble for verdict in kept)
    assert broken.call == call
    assert broken.trouble
    assert words in broken.fix
    assert not [key for key in store.objects if key.startswith("probe/")]


def test_a_role_refuses_to_start_on_a_store_that_overwrites() -> None:
    with pytest.raises(StoreRefusedError, match=r"memory://: create again: .*conditional puts"):
        probe(Overwrites())


@pytest.mark.parametrize("call", ["create", "get", "get_range", "list", "delete"])
def test_a_call_that_is_denied_is_named_with_the_rights_it_needs(call: str) -> None:
    faults = Schedule(rates={Fault.DENIED: 1}, hits=lambda name, _key: name == call)
    broken = list(check_promises(FaultyStore(MemoryStore(), faults)))[-1]
    assert broken.call == call
    assert "GetObject" in broken.fix


def test_a_store_that_is_down_is_no_store_with_broken_promises() -> None:
    faults = Schedule()
    faults.down(is_down=True)
    with pytest.raises(StoreError, match="check endpoint, region and network") as caught:
        probe(FaultyStore(MemoryStore(), faults))
    assert not isinstance(caught.value, StoreRefusedError), "it may answer later"
