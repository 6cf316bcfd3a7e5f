"""Publishing and reading whole versions."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore, MissingError
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.common.weights import FullManifest, Tensor, VersionId
from etude.common.weights.protocol import sealed, transfer

Publish = Callable[..., FullManifest]
Tensors = Callable[[float], list[Tensor]]


def content(store: MemoryStore, version: VersionId) -> dict[str, bytes]:
    manifest = weights.read_full_manifest(store, version)
    return {
        tensor.name: bytes(memoryview(tensor.data))
        for fetched in weights.fetch(store, manifest)
        for tensor in fetched.tensors
    }


def test_a_published_version_reads_back_bit_for_bit(
    store: MemoryStore, publish: Publish, claim: Callable[..., int], tensors: Tensors
) -> None:
    claim()
    manifest = publish(1, 0, 7.0)
    assert weights.newest(store) == manifest.version == VersionId(1, 0)
    assert content(store, VersionId(1, 0)) == {
        t.name: bytes(memoryview(t.data)) for t in tensors(7.0)
    }


def test_a_large_version_is_cut_into_parts(
    store: MemoryStore,
    publish: Publish,
    claim: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", 16)
    claim()
    assert len(publish(1, 0).objects) == 3
    assert len(content(store, VersionId(1, 0))) == 4


def test_publishing_again_after_a_lost_reply_changes_nothing(
    store: MemoryStore, publish: Publish, claim: Callable[..., int]
) -> None:
    claim()
    first = publish(1, 0)
    before = dict(store.objects)
    assert publish(1, 0) == first
    assert store.objects == before


def test_another_content_under_a_published_number_is_refused(
    publish: Publish, claim: Callable[..., int]
) -> None:
    claim()
    publish(1, 0, 1.0)
    with pytest.raises(FencedError, match="other content"):
        publish(1, 0, 2.0)


def test_a_number_below_the_epochs_first_is_refused(
    publish: Publish, claim: Callable[..., int]
) -> None:
    claim()
    publish(1, 4)
    claim(VersionId(1, 4))
    with pytest.raises(ValueError, match="starts at number 5"):
        publish(2, 4)


def test_a_tensor_that_comes_twice_is_refused(
    store: MemoryStore, claim: Callable[..., int], tensors: Tensors
) -> None:
    claim()
    doubled = [*tensors(1.0), tensors(1.0)[0]]
    with pytest.raises(ValueError, match="comes twice"):
        weights.publish(
            store, run="r", version=VersionId(1, 0), step=0, holder="h", tensors=doubled
        )
    assert weights.newest(store) is None


def test_a_version_that_was_never_published_is_missing(
    store: MemoryStore, claim: Callable[..., int]
) -> None:
    claim()
    with pytest.raises(MissingError):
        weights.read_full_manifest(store, VersionId(1, 3))


def test_a_pruned_payload_is_missing_and_not_corrupt(
    store: MemoryStore, publish: Publish, claim: Callable[..., int]
) -> None:
    claim()
    manifest = publish(1, 0)
    del store.objects[manifest.objects[0].key]
    with pytest.raises(MissingError):
        list(weights.fetch(store, manifest))


def test_damage_on_the_way_is_read_again_and_damage_in_the_store_is_not(
    publish: Publish, store: MemoryStore, claim: Callable[..., int]
) -> None:
    claim()
    manifest = publish(1, 0)
    flaky = FlakyReads(objects=store.objects, failures=1)
    assert sum(len(each.tensors) for each in weights.fetch(flaky, manifest)) == 4
    broken = FlakyReads(objects=store.objects, failures=99)
    with pytest.raises(CorruptError, match="BLAKE3"):
        list(weights.fetch(broken, manifest))


def test_a_truncated_or_longer_payload_is_refused_before_it_is_fetched(
    store: MemoryStore, publish: Publish, claim: Callable[..., int]
) -> None:
    claim()
    manifest = publish(1, 0)
    key = manifest.objects[0].key
    for data in (store.objects[key][:-1], store.objects[key] + b"\0"):
        store.objects[key] = data
        with pytest.raises(CorruptError, match="the manifest says"):
            list(weights.fetch(store, manifest))


def accept_and_read(store: MemoryStore, version: VersionId) -> None:
    """What a replica does, as far as the store is concerned."""
    content(store, version)
    weights.is_accepted(store, version)


def test_each_of_2000_flipped_bits_is_detected(
    store: MemoryStore, publish: Publish, claim: Callable[..., int]
) -> None:
    claim()
    manifest = publish(1, 0)
    clean = content(store, VersionId(1, 0))
    keys = [
        manifest.objects[0].key,
        VersionId(1, 0).manifest_key,
        "weights/epochs/000001.json",
    ]
    draw = random.Random(1)
    for turn in range(2_000):
        key = keys[turn % len(keys)]
        good = store.objects[key]
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        store.objects[key] = bytes(bad)
        with pytest.raises(CorruptError):
            accept_and_read(store, VersionId(1, 0))
        store.objects[key] = good
    assert content(store, VersionId(1, 0)) == clean


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"number": 1}, "the manifest is of version 1.1"),
        ({"epoch": -1}, "greater than or equal to 1"),
        ({"extra": 1}, "Extra inputs"),
        ({"step": "3"}, "valid integer"),
        ({"objects": []}, "at least 1 item"),
        ({"format": 2}, "Input should be 1"),
    ],
)
def test_a_sealed_manifest_with_a_wrong_field_is_refused(
    store: MemoryStore,
    publish: Publish,
    claim: Callable[..., int],
    change: dict[str, object],
    complaint: str,
) -> None:
    claim()
    body = publish(1, 0).model_dump() | change
    store.objects[VersionId(1, 0).manifest_key] = sealed.seal(body)
    with pytest.raises(CorruptError, match=complaint):
        weights.read_full_manifest(store, VersionId(1, 0))


@pytest.mark.parametrize(
    "key",
    [
        "weights/full/1-0/../../../etc/passwd",
        "weights/full/1-1/0000-0123456789abcdef.safetensors",
        "/etc/passwd",
        "weights/full/1-0/evil",
    ],
)
def test_a_manifest_that_names_a_key_elsewhere_is_refused(
    store: MemoryStore, publish: Publish, claim: Callable[..., int], key: str
) -> None:
    claim()
    body = publish(1, 0).model_dump()
    body["objects"][0]["key"] = key
    store.objects[VersionId(1, 0).manifest_key] = sealed.seal(body)
    with pytest.raises(CorruptError, match="outside the version's prefix"):
        weights.read_full_manifest(store, VersionId(1, 0))


def test_a_create_whose_reply_is_lost_counts_as_published(
    tensors: Tensors,
) -> None:
    store = LostReplies()
    weights.claim_epoch(store, holder="h", parent=None, reason="start")
    store.loses = True
    weights.publish(
        store, run="r", version=VersionId(1, 0), step=0, holder="h", tensors=tensors(1.0)
    )
    assert weights.newest(store) == VersionId(1, 0)


def test_a_store_that_fails_before_the_manifest_leaves_nothing_to_read(
    tensors: Tensors,
) -> None:
    store = RefusesCreates()
    weights.claim_epoch(store, holder="h", parent=None, reason="start")
    store.refuses = True
    with pytest.raises(StoreError, match="503"):
        weights.publish(
            store, run="r", version=VersionId(1, 0), step=0, holder="h", tensors=tensors(1.0)
        )
    assert weights.newest(store) is None


def test_the_text_form_of_a_version_is_exact() -> None:
    assert str(VersionId(3, 128)) == "3.128"
    assert VersionId.parse("3.128") == VersionId(3, 128)
    for text in ("", "3", "3.", "03.1", "3.01", "-3.1", "3.1 ", "٣.1", "default"):
        with pytest.raises(ValueError, match="no policy version"):
            VersionId.parse(text)


@dataclass(slots=True)
class FlakyReads(MemoryStore):
    """Flips a bit of the first reads of payloads."""

    failures: int = 0

    @override
    def get(self, key: str) -> bytes:
        data = bytearray(self.objects[key])
        if self.failures > 0 and key.endswith(".safetensors"):
            self.failures -= 1
            data[-1] ^= 1
        return bytes(data)


@dataclass(slots=True)
class LostReplies(MemoryStore):
    """Creates, then says that the connection broke."""

    loses: bool = False

    @override
    def create(self, key: str, data: bytes) -> None:
        self.objects.setdefault(key, data)
        if self.loses:
            raise StoreError(f"{key}: connection reset")


@dataclass(slots=True)
class RefusesCreates(MemoryStore):
    """Answers creates with an error once told to."""

    refuses: bool = False

    @override
    def create(self, key: str, data: bytes) -> None:
        if self.refuses:
            raise StoreError(f"{key}: 503")
        self.objects[key] = data
