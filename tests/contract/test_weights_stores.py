"""Publishing, fencing, reading and pruning are the same on every object store."""

import struct
import threading

import pytest

from etude.common import weights
from etude.common.blobs import Store
from etude.common.errors import EtudeError, FencedError
from etude.common.weights import Tensor, VersionId


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


def publish(store: Store, version: VersionId, value: float) -> None:
    tensor = Tensor(name="w", dtype="F32", shape=(1,), data=struct.pack("<f", value))
    weights.publish(store, run="r", version=version, step=0, holder="h", tensors=[tensor])


def test_an_empty_store_has_no_version(store: Store) -> None:
    assert weights.newest(store) is None
    assert weights.accepted_chain(store) == []
    assert not weights.is_accepted(store, VersionId(1, 0))


def test_a_line_of_versions_is_published_taken_over_read_and_pruned(store: Store) -> None:
    assert weights.claim_epoch(store, holder="a", parent=None, reason="start") == 1
    for number in range(3):
        publish(store, VersionId(1, number), number)
    assert weights.claim_epoch(store, holder="b", parent=VersionId(1, 1), reason="takeover") == 2
    with pytest.raises(FencedError):
        publish(store, VersionId(1, 3), 3)
    publish(store, VersionId(2, 3), 33)
    publish(store, VersionId(2, 3), 33)
    line = [VersionId(1, 0), VersionId(1, 1), VersionId(2, 3)]
    assert weights.accepted_chain(store) == line
    [fetched] = weights.fetch(store, weights.read_full_manifest(store, VersionId(2, 3)))
    [tensor] = fetched.tensors
    assert struct.unpack("<f", tensor.data) == (33.0,)
    deleted = weights.prune(store, keep={VersionId(1, 1), VersionId(2, 3)})
    assert deleted[:2] == [VersionId(1, 2).manifest_key, VersionId(1, 0).manifest_key]
    assert weights.accepted_chain(store) == line[1:]
    assert weights.newest(store) == VersionId(2, 3)


def test_of_publishers_that_start_together_each_gets_an_epoch_of_its_own(store: Store) -> None:
    found: list[int] = []

    def claim(holder: str) -> None:
        found.append(weights.claim_epoch(store, holder=holder, parent=None, reason="start"))

    threads = [threading.Thread(target=claim, args=(f"h-{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert [epoch for epoch in found if not weights.is_fenced(store, epoch)] == [6]


def test_of_publishers_of_one_version_with_different_content_one_wins(store: Store) -> None:
    weights.claim_epoch(store, holder="h", parent=None, reason="start")
    outcomes: list[str] = []

    def race(value: float) -> None:
        try:
            publish(store, VersionId(1, 0), value)
        except EtudeError as error:
            outcomes.append(error.reason)
        else:
            outcomes.append("published")

    threads = [threading.Thread(target=race, args=(float(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["Fenced"] * 7 + ["published"]
    assert len(list(weights.fetch(store, weights.read_full_manifest(store, VersionId(1, 0))))) == 1
