"""What lies among the epochs' records, and what is missing there, is said; nothing else stops."""

from typing import Any

import pytest

from etude.cli.weights.survey import survey
from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, WrongStateError
from etude.common.weights import VersionId
from etude.common.weights.protocol import records
from etude.common.weights.protocol.epochs import EpochRecord, epochs_of, stray_keys
from etude.common.weights.protocol.versions import MAX_EPOCH, MAX_NUMBER, epoch_key

V0, V1 = VersionId(1, 0), VersionId(1, 1)
STRAYS = (
    *("000001.json~", "000002.json/x", "notes.txt", "zzz", "000000.json", "1000000.json"),
    "000003.json.part",
)


def test_files_that_are_no_records_stop_neither_readers_nor_publishers(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    for name in STRAYS:
        store.put(f"weights/epochs/{name}", b"hi")
    assert weights.newest_version(store) == V0
    assert line.open(V0, "takeover") == 2
    line.publish(VersionId(2, 1), (1, 2, 4), base=V0)
    assert weights.accepted_chain(store) == [V0, VersionId(2, 1)]
    assert epochs_of(store) == [1, 2]
    assert stray_keys(store) == sorted(f"weights/epochs/{name}" for name in STRAYS)


def test_a_chain_over_a_missing_record_is_damaged_and_the_record_named(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    line.open(V0, "takeover")
    del store.objects[epoch_key(1)]
    with pytest.raises(CorruptError, match=r"epochs/000001\.json: missing, though epoch 2 goes on"):
        weights.accepted_chain(store)


def test_versions_whose_epoch_has_no_record_are_damaged_not_abandoned(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    line.open(V0, "takeover")
    line.publish(VersionId(2, 1), (1, 2, 4), base=V0)
    del store.objects[epoch_key(2)]
    first, second = survey(store)
    assert (first.standing, first.problem) == ("accepted", "")
    assert second.standing == "damaged"
    assert second.problem.endswith("weights/epochs/000002.json: missing")


def test_no_epoch_is_opened_under_the_number_of_its_own_parent(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    del store.objects[epoch_key(1)]
    with pytest.raises(CorruptError, match=r"epochs/000001\.json: missing"):
        weights.claim_epoch(store, holder="t", parent=V0, reason="takeover")
    assert epochs_of(store) == []


def test_the_last_epoch_that_a_key_can_name_is_the_last(store: MemoryStore) -> None:
    record = EpochRecord(
        epoch=MAX_EPOCH,
        parent_epoch=None,
        parent_number=None,
        first_number=0,
        reason="start",
        holder="t",
        nonce="n",
    )
    store.create(epoch_key(MAX_EPOCH), records.to_bytes(record))
    with pytest.raises(WrongStateError, match="no key comes after epoch 999999: start a new run"):
        weights.claim_epoch(store, holder="t", parent=None, reason="takeover")


def test_the_last_number_that_a_key_can_name_is_the_last(store: MemoryStore) -> None:
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    store.put(VersionId(1, MAX_NUMBER).manifest_key, b"x")
    with pytest.raises(WrongStateError, match="no key comes after number 999999999999"):
        weights.claim_epoch(store, holder="t", parent=None, reason="takeover")
