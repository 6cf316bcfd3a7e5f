"""Skips and keyframes become visible with their record, once."""

from typing import Any

import pytest

from etude.common import weights
from etude.common.blobs import MemoryStore, MissingError
from etude.common.errors import CorruptError, StoreError
from etude.common.weights import VersionId

V = [VersionId(1, number) for number in range(6)]


def test_a_skip_and_a_keyframe_read_back(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(4)
    skip, keyframe = line.skip(V[0], V[3]), line.keyframe(V[2])
    assert weights.read_skip(store, V[0], V[3]) == skip
    assert weights.read_keyframe(store, V[2]) == keyframe
    with pytest.raises(MissingError):
        weights.read_skip(store, V[1], V[3])
    with pytest.raises(MissingError):
        weights.read_keyframe(store, V[3])


def test_writing_the_same_again_changes_nothing(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(4)
    first = line.skip(V[0], V[3])
    before = dict(store.objects)
    assert line.skip(V[0], V[3]) == first
    assert store.objects == before


def test_of_two_writers_the_first_stays(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(4)
    first = line.keyframe(V[3], pad=10)
    assert line.keyframe(V[3], pad=20) == first
    assert weights.read_keyframe(store, V[3]) == first


def test_a_record_without_its_payloads_is_refused(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(4)
    skip = line.skip(V[0], V[2])
    del store.objects[skip.key], store.objects[skip.objects[0].key]
    with pytest.raises(StoreError, match="bytes instead of"):
        weights.publish_folded(store, skip)


def test_a_part_without_a_record_is_not_planned_with(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(4, pad=500)
    skip = line.skip(V[0], V[3])
    live = line.manifests[V[0]].ref
    assert [edge.kind for edge in weights.plan_path(store, live, V[3])] == ["skip"]
    del store.objects[skip.key]
    assert [edge.kind for edge in weights.plan_path(store, live, V[3])] == ["delta"] * 3


def test_a_damaged_record_in_the_way_is_said(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(4)
    keyframe = line.keyframe(V[3])
    store.objects[keyframe.key] = b"{}"
    with pytest.raises(CorruptError, match="keyframe"):
        weights.publish_folded(store, keyframe)


def test_a_keyframe_of_other_weights_is_not_planned_with(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(4)
    target = line.manifests[V[3]].ref.model_copy(update={"state": "0" * 32})
    line.keyframe(V[3], pad=0, target=target)
    edges = weights.plan_path(store, None, V[3])
    assert edges[0].kind == "complete"
    assert line.applied(None, edges) == line.models[V[3]]
