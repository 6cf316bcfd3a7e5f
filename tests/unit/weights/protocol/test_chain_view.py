"""A view that grows with the store is the view that one gets by looking at everything."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.errors import StoreError
from etude.common.weights import VersionId
from etude.common.weights.protocol.chain_view import ChainViewer, take_view

MAKE_LINE: list[Any] = []


@pytest.fixture(autouse=True)
def _remember_line(line: Any) -> None:
    MAKE_LINE[:] = [type(line)]


@dataclass
class Counted(MemoryStore):
    """Counts what it lists."""

    calls: int = 0
    listed: int = 0

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        found = [*MemoryStore.list(self, prefix, after)]
        self.calls += 1
        self.listed += len(found)
        return iter(found)


@given(st.data())
def test_a_view_grows_as_the_store_does(data: st.DataObject) -> None:
    line = MAKE_LINE[0](MemoryStore())
    viewer = ChainViewer(line.store)
    assert viewer.refresh() == take_view(line.store)
    line.open()
    epoch, newest = 1, None
    for number in range(data.draw(st.integers(1, 12))):
        if newest is not None and data.draw(st.integers(0, 4)) == 0:
            newest = data.draw(st.sampled_from(take_view(line.store).usable))
            epoch = line.open(newest, "rollback")
        version = VersionId(epoch, number)
        line.publish(version, (number, epoch), base=newest)
        if data.draw(st.booleans()):
            viewer.refresh()
        # Of the newest version, and maybe after it was seen.
        if data.draw(st.booleans()):
            line.keyframe(version)
        if newest is not None and data.draw(st.booleans()):
            line.skip(newest, version)
        if data.draw(st.integers(0, 5)) == 0:
            weights.quarantine(line.store, version, reason="wrong bits")
            epoch = line.open(newest, "rollback")
        else:
            newest = version
        assert viewer.refresh() == take_view(line.store)


def test_a_look_costs_what_is_new(line: Any) -> None:
    store = line.store = Counted()
    line.open()
    versions = line.many(60)
    viewer = ChainViewer(store)
    viewer.refresh()
    line.publish(VersionId(1, 60), (60, 0, 1), base=versions[-1])
    store.calls = store.listed = 0
    view = viewer.refresh()
    assert len(view.chain) == 61
    # Refused ones, manifests, payloads of the last two versions, skips, keyframes.
    assert (store.calls, store.listed) == (5, 3)


def test_what_was_deleted_is_seen_once_the_view_is_forgotten(line: Any, store: MemoryStore) -> None:
    line.open()
    versions = line.many(6)
    viewer = ChainViewer(store)
    viewer.refresh()
    store.delete([versions[0].manifest_key])
    assert viewer.refresh().chain == versions
    viewer.reset()
    assert viewer.refresh() == take_view(store)


def test_a_look_that_failed_is_begun_anew(line: Any) -> None:
    @dataclass
    class Failing(MemoryStore):
        """Fails once it is told to."""

        fails: bool = False

        @override
        def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
            if self.fails and prefix == "weights/skips/":
                raise StoreError("503")
            return MemoryStore.list(self, prefix, after)

    store = line.store = Failing()
    line.open()
    versions = line.many(3)
    viewer = ChainViewer(store)
    viewer.refresh()
    store.delete([versions[0].manifest_key])
    store.fails = True
    with pytest.raises(StoreError, match="503"):
        viewer.refresh()
    store.fails = False
    assert viewer.refresh() == take_view(store)
