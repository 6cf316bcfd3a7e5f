"""Committing a version, whatever the store answers."""

from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, FencedError, StoreError, WrongStateError
from etude.common.weights import VersionId

V0, V1 = VersionId(1, 0), VersionId(1, 1)


@dataclass(slots=True)
class Unreliable(MemoryStore):
    """Fails its next create, before or after it took effect."""

    fails: str = ""

    @override
    def create(self, key: str, data: bytes) -> None:
        fails, self.fails = self.fails, ""
        if fails == "before":
            raise StoreError(f"{key}: 503")
        MemoryStore.create(self, key, data)
        if fails == "after":
            raise StoreError(f"{key}: connection reset")
        if fails == "repeated":
            MemoryStore.create(self, key, data)


@pytest.fixture
def store() -> Unreliable:
    return Unreliable()


@pytest.mark.parametrize("fails", ["after", "repeated"])
def test_a_create_whose_reply_is_lost_counts(line: Any, store: Unreliable, fails: str) -> None:
    line.open()
    manifest = line.manifest(V0, (1, 2, 3))
    store.fails = fails
    assert weights.publish_manifest(store, manifest) == manifest
    assert weights.newest_version(store) == V0


def test_a_create_that_never_arrived_is_the_callers_to_repeat(line: Any, store: Unreliable) -> None:
    line.open()
    manifest = line.manifest(V0, (1, 2, 3))
    store.fails = "before"
    with pytest.raises(StoreError, match="503"):
        weights.publish_manifest(store, manifest)
    assert weights.newest_version(store) is None
    assert weights.publish_manifest(store, manifest) == manifest
    assert weights.publish_manifest(store, manifest) == manifest


@pytest.mark.parametrize("fails", ["", "before"])
def test_another_content_under_a_published_number_is_fenced(
    line: Any, store: Unreliable, fails: str
) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    other = line.manifest(V0, (1, 2, 9))
    store.fails = fails
    with pytest.raises(FencedError, match="other content"):
        weights.publish_manifest(store, other)


def test_after_a_take_over_nothing_is_published(line: Any, store: Unreliable) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    manifest = line.manifest(V1, (1, 2, 4), base=V0)
    line.open(V0, "takeover")
    before = dict(store.objects)
    with pytest.raises(FencedError, match="epoch 2"):
        weights.publish_manifest(store, manifest)
    assert store.objects == before


def test_a_fenced_publisher_whose_payload_was_collected_learns_that_it_is_fenced(
    line: Any, store: Unreliable
) -> None:
    line.open()
    waiting = line.manifest(VersionId(1, 0), (1, 2, 3))
    line.open(reason="takeover")
    store.delete([waiting.objects[0].key])
    with pytest.raises(FencedError, match="epoch 2"):  # not an error that asks to try again
        weights.publish_manifest(store, waiting)


def test_a_version_whose_payload_is_missing_or_torn_is_not_committed(
    line: Any, store: Unreliable
) -> None:
    line.open()
    manifest = line.manifest(V0, (1, 2, 3))
    [item] = manifest.objects
    whole = store.objects[item.key]
    for torn in (None, whole[:-1], whole + b"0"):
        if torn is None:
            del store.objects[item.key]
        else:
            store.objects[item.key] = torn
        with pytest.raises(StoreError, match="bytes instead of"):
            weights.publish_manifest(store, manifest)
    assert weights.newest_version(store) is None


def test_a_version_of_a_schema_that_nobody_stored_is_not_committed(
    line: Any, store: Unreliable
) -> None:
    line.open()
    with pytest.raises(StoreError, match="schema"):
        line.publish(V0, (1, 2, 3), schema_sha256="0" * 64)


def test_a_number_below_the_epochs_first_is_refused(line: Any) -> None:
    line.open()
    line.publish(VersionId(1, 4), (1, 2, 3))
    line.open(VersionId(1, 4))
    with pytest.raises(ValueError, match="starts at number 5"):
        line.publish(VersionId(2, 4), (1, 2, 3))


def test_the_first_version_of_an_epoch_builds_on_its_parent_or_on_nothing(line: Any) -> None:
    line.open()
    versions = line.many(3)
    line.open(versions[1], "rollback")
    with pytest.raises(ValueError, match=r"base 1\.2 is neither"):
        line.publish(VersionId(2, 3), (9, 9, 9), base=versions[2])
    line.publish(VersionId(2, 3), (9, 9, 9), base=versions[1])
    line.publish(VersionId(2, 4), (9, 9, 8), base=VersionId(2, 3))
    line.publish(VersionId(2, 5), (9, 9, 7))


def test_a_base_that_is_not_what_the_store_has_is_refused(line: Any, store: Unreliable) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    forged = line.manifests[V0].ref.model_copy(update={"state": "0" * 32})
    manifest = line.manifest(V1, (1, 2, 4), base=V0).model_copy(update={"base": forged})
    with pytest.raises(ValueError, match="not what the store has"):
        weights.publish_manifest(store, manifest)


def test_a_version_on_a_base_that_is_gone_must_be_complete(line: Any, store: Unreliable) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    manifest = line.manifest(V1, (1, 2, 4), base=V0)
    del store.objects[V0.manifest_key]
    with pytest.raises(WrongStateError, match="complete version"):
        weights.publish_manifest(store, manifest)


def test_a_schema_is_stored_once_under_its_digest(line: Any, store: Unreliable) -> None:
    line.open()
    assert weights.read_schema_bytes(store, line.schema) == b"schema"
    key = weights.put_schema(store, b"schema", line.schema)
    with pytest.raises(ValueError, match="other bytes"):
        weights.put_schema(store, b"other", line.schema)
    store.objects[key] = b"schemA"
    with pytest.raises(CorruptError, match="digest"):
        weights.put_schema(store, b"schema", line.schema)
    with pytest.raises(CorruptError, match="digest"):
        weights.read_schema_bytes(store, line.schema)
    with pytest.raises(CorruptError, match="no digest"):
        weights.read_schema_bytes(store, "../secret")


@pytest.mark.parametrize("fails", ["after", "repeated"])
def test_an_epoch_whose_reply_is_lost_is_recognised(
    line: Any, store: Unreliable, fails: str
) -> None:
    store.fails = fails
    assert weights.claim_epoch(store, holder="h", parent=None, reason="start") == 1
