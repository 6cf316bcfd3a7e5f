"""What a manifest, a record or a key may say, and what is refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.common import weights
from etude.common.blobs import MemoryStore, MissingError
from etude.common.errors import CorruptError, InvalidFieldError
from etude.common.weights import Skip, VersionId
from etude.common.weights.protocol import records
from etude.common.weights.protocol import versions as keys
from etude.common.weights.protocol.manifest import WeightManifest, parse_manifest

V0, V1 = VersionId(1, 0), VersionId(1, 1)
VERSIONS = st.builds(VersionId, st.integers(1, keys.MAX_EPOCH), st.integers(0, keys.MAX_NUMBER))
SHA16 = st.text("0123456789abcdef", min_size=16, max_size=16)


def parsed(body: dict[str, Any], version: VersionId = V1) -> WeightManifest:
    return parse_manifest(records.seal(body), version=version, where="memory://manifest")


def test_a_manifest_reads_back_as_it_was_committed(line: Any, store: MemoryStore) -> None:
    line.open()
    first = line.publish(V0, (1, 2, 3))
    second = line.publish(V1, (1, 2, 4), base=V0)
    assert weights.read_manifest(store, V0) == first
    assert weights.read_manifest(store, V1) == second
    assert first.is_complete
    assert not second.is_complete
    assert second.base == first.ref


def test_the_same_content_gives_the_same_bytes(line: Any) -> None:
    line.open()
    again = [line.manifest(V0, (1, 2, 3)).to_bytes() for _ in range(2)]
    assert again[0] == again[1]


def test_each_of_2000_flipped_bits_is_detected(line: Any) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    data = line.publish(V1, (1, 2, 4), base=V0).to_bytes()
    draw = random.Random(1)
    for _ in range(2_000):
        bad = bytearray(data)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        with pytest.raises(CorruptError):
            parse_manifest(bytes(bad), version=V1, where="memory://manifest")


def test_a_manifest_cut_anywhere_is_refused(line: Any) -> None:
    line.open()
    data = line.manifest(V0, (1, 2, 3)).to_bytes()
    for end in range(len(data)):
        with pytest.raises(CorruptError):
            parse_manifest(data[:end], version=V0, where="memory://manifest")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"number": 2}, "version 1.2|outside the version's prefix"),
        ({"epoch": 0}, "greater than or equal to 1"),
        ({"number": 10**13}, "less than or equal"),
        ({"number": 10**400}, "manifest"),
        ({"extra": 1}, "Extra inputs"),
        ({"step": "3"}, "valid integer"),
        ({"step": -1}, "greater than or equal to 0"),
        ({"step": 1.5}, "valid integer"),
        ({"format": 1}, "Input should be 2"),
        ({"base": None}, "outside the version's prefix"),
        ({"base": None, "objects": []}, "a complete version without objects"),
        ({"state": "0" * 31}, "should match pattern"),
        ({"state": "A" * 32}, "should match pattern"),
        ({"schema_sha256": "../../etc/passwd"}, "should match pattern"),
        ({"run": "r" * 257}, "at most 256"),
        ({"objects": {}}, "valid tuple|valid array"),
    ],
)
def test_a_sealed_manifest_with_a_wrong_field_is_refused_by_name(
    line: Any, change: dict[str, Any], complaint: str
) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    body = line.publish(V1, (1, 2, 4), base=V0).model_dump(mode="json")
    with pytest.raises(CorruptError, match=complaint) as caught:
        parsed(body | change)
    assert "memory://manifest" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "weights/deltas/000001/000000000001/../../../etc/passwd",
        "weights/deltas/000001/000000000000/r0000-0123456789abcdef.dlt",
        "weights/deltas/000001/000000000001/r0001-0123456789abcdef.dlt",
        "weights/deltas/000001/000000000001/r0000-0123456789abcdef.kf",
        "weights/deltas/000001/000000000001/r0000-0123456789ABCDEF.dlt",
        "weights/deltas/000001/00000000000\u0661/r0000-0123456789abcdef.dlt",
        "weights/deltas/000001/000000000001/r0000-0123456789abcdef.dlt\n",
        "/etc/passwd",
        "other-run/weights/deltas/000001/000000000001/r0000-0123456789abcdef.dlt",
        "weights/keyframes/000001-000000000001/p0000-0123456789abcdef.kf",
    ],
)
def test_a_manifest_that_names_a_key_elsewhere_is_refused(line: Any, key: str) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    body = line.publish(V1, (1, 2, 4), base=V0).model_dump(mode="json")
    body["objects"][0]["key"] = key
    with pytest.raises(CorruptError, match="outside the version's prefix"):
        parsed(body)


def test_ranks_come_sorted_and_once(line: Any) -> None:
    line.open()
    body = line.manifest(V0, (1, 2, 3)).model_dump(mode="json")
    body["objects"] *= 2
    with pytest.raises(CorruptError, match="ranks are not sorted, each once"):
        parsed(body, V0)


@pytest.mark.parametrize("base", [V1, VersionId(1, 2), VersionId(2, 0)])
def test_a_base_that_is_not_before_its_version_is_refused(line: Any, base: VersionId) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    body = line.publish(V1, (1, 2, 4), base=V0).model_dump(mode="json")
    body["base"] |= {"epoch": base.epoch, "number": base.number}
    with pytest.raises(CorruptError, match="is not before"):
        parsed(body)


def test_an_index_that_ends_past_its_object_is_refused(line: Any) -> None:
    line.open()
    body = line.manifest(V0, (1, 2, 3)).model_dump(mode="json")
    body["objects"][0] |= {"index_offset": body["objects"][0]["size"]}
    with pytest.raises(CorruptError, match="the index ends past"):
        parsed(body, V0)


def test_an_object_larger_than_any_record_is_not_even_read(
    line: Any, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.objects[V0.manifest_key] = b" " * (records.MAX_BYTES + 1)
    monkeypatch.setattr(MemoryStore, "get", _never)
    with pytest.raises(CorruptError, match="more than"):
        weights.read_manifest(store, V0)


def test_no_record_is_written_that_its_reader_would_refuse(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.open()
    manifest = line.manifest(V0, (1, 2, 3))
    data = manifest.to_bytes()
    monkeypatch.setattr(records, "MAX_BYTES", len(data))
    assert parse_manifest(manifest.to_bytes(), version=V0, where="x") == manifest
    monkeypatch.setattr(records, "MAX_BYTES", len(data) - 1)
    with pytest.raises(InvalidFieldError, match=rf"WeightManifest: takes {len(data)} bytes"):
        manifest.to_bytes()
    with pytest.raises(CorruptError, match="more than"):
        parse_manifest(data, version=V0, where="x")


def _never(self: MemoryStore, key: str) -> bytes:
    raise AssertionError(f"{key} was read")


def test_deep_or_strange_json_is_refused() -> None:
    for data in (b"[" * 100_000, b"{}", b"null", b"NaN", b"\xff", b'{"blake3":1}', b"1" * 5_000):
        with pytest.raises(CorruptError):
            parse_manifest(data, version=V0, where="x")


def test_a_version_that_was_never_published_is_missing(store: MemoryStore) -> None:
    with pytest.raises(MissingError):
        weights.read_manifest(store, V0)


@pytest.mark.parametrize("kind", ["skip", "keyframe"])
def test_a_folded_record_that_lies_under_another_key_is_refused(
    line: Any, store: MemoryStore, kind: str
) -> None:
    line.open()
    versions = line.many(3)
    read: Callable[[], object]
    if kind == "skip":
        record = line.skip(versions[0], versions[2])
        key = keys.skip_key(versions[0], versions[1])
        read = lambda: weights.read_skip(store, versions[0], versions[1])  # noqa: E731
    else:
        record = line.keyframe(versions[2])
        key = keys.keyframe_key(versions[1])
        read = lambda: weights.read_keyframe(store, versions[1])  # noqa: E731
    store.objects[key] = store.objects[record.key]
    with pytest.raises(CorruptError, match="the record is of"):
        read()


def test_a_folded_record_names_only_its_own_parts(line: Any) -> None:
    line.open()
    versions = line.many(3)
    skip = line.skip(versions[0], versions[2])
    other = line.skip(versions[1], versions[2])
    with pytest.raises(ValidationError, match="outside the skip's prefix"):
        line.skip(versions[0], versions[2], objects=other.objects)
    with pytest.raises(ValidationError, match="outside the keyframe's prefix"):
        line.keyframe(versions[2], objects=skip.objects)
    with pytest.raises(ValidationError, match="is not before"):
        Skip.model_validate(skip.model_dump() | {"target": skip.base, "base": skip.target})


@given(
    base=VERSIONS,
    target=VERSIONS,
    part=st.integers(0, 9_999),
    sha16=SHA16,
    complete=st.booleans(),
)
def test_every_key_says_what_it_was_made_of(
    base: VersionId, target: VersionId, part: int, sha16: str, *, complete: bool
) -> None:
    delta = keys.delta_key(target, part, sha16, complete=complete)
    assert keys.parse_delta_key(delta) == (target, part, complete)
    assert keys.parse_skip_key(keys.skip_key(base, target)) == (base, target, None)
    assert keys.parse_skip_key(keys.skip_part_key(base, target, part, sha16)) == (
        base,
        target,
        part,
    )
    assert keys.parse_keyframe_key(keys.keyframe_key(target)) == (target, None)
    assert keys.parse_keyframe_key(keys.keyframe_part_key(target, part, sha16)) == (target, part)
    assert keys.parse_manifest_key(target.manifest_key) == target
    assert keys.parse_label(target.label) == target


@given(VERSIONS, VERSIONS)
def test_keys_sort_as_versions_do(a: VersionId, b: VersionId) -> None:
    assert (a.manifest_key < b.manifest_key) == (a < b)
    assert (a.label < b.label) == (a < b)


def test_the_text_form_of_a_version_is_exact() -> None:
    assert str(VersionId(3, 128)) == "3.128"
    assert VersionId.parse("3.128") == VersionId(3, 128)
    for text in ("", "3", "3.", "03.1", "3.01", "-3.1", "3.1 ", "٣.1", "default"):
        with pytest.raises(ValueError, match="no policy version"):
            VersionId.parse(text)
