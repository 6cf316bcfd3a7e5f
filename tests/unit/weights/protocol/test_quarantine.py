"""Versions that nobody may commit."""

import json
from typing import Any

import pytest

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import QuarantinedVersionError, VersionId
from etude.common.weights.protocol.versions import quarantine_key

V0, V1, V2 = (VersionId(1, number) for number in range(3))


def test_a_refused_version_is_known_and_says_why(store: MemoryStore) -> None:
    assert not weights.is_quarantined(store, V1)
    weights.quarantine(store, V1, reason="digest differs on 3 of 4 replicas")
    weights.quarantine(store, V1, reason="a later reason")
    assert weights.is_quarantined(store, V1)
    assert weights.list_quarantined(store) == {V1}
    assert (
        json.loads(store.objects[quarantine_key(V1)])["reason"]
        == "digest differs on 3 of 4 replicas"
    )


def test_a_damaged_record_still_refuses(store: MemoryStore) -> None:
    weights.quarantine(store, V1, reason="r" * 5_000)
    [key] = store.objects
    store.objects[key] = b"?"
    store.objects["weights/quarantine/readme.txt"] = b""
    assert weights.list_quarantined(store) == {V1}


def test_a_refused_version_is_never_committed_nor_built_upon(line: Any, store: MemoryStore) -> None:
    line.open()
    line.publish(V0, (1, 2, 3))
    late = line.manifest(V1, (1, 2, 4), base=V0)
    weights.quarantine(store, V1, reason="r")
    with pytest.raises(QuarantinedVersionError, match=r"1\.1"):
        weights.publish_manifest(store, late)
    line.publish(V2, (1, 2, 5), base=V0)
    weights.quarantine(store, V2, reason="r")
    with pytest.raises(QuarantinedVersionError, match=r"base 1\.2"):
        line.publish(VersionId(1, 3), (1, 2, 6), base=V2)


def test_a_plan_neither_ends_at_a_refused_version_nor_needs_one(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    versions = line.many(5)
    weights.quarantine(store, versions[2], reason="r")
    with pytest.raises(QuarantinedVersionError):
        weights.plan_path(store, None, versions[2])
    with pytest.raises(FileNotFoundError):
        weights.plan_path(store, line.manifests[versions[1]].ref, versions[4])
    line.skip(versions[1], versions[3])
    edges = weights.plan_path(store, line.manifests[versions[1]].ref, versions[4])
    assert [edge.kind for edge in edges] == ["skip", "delta"]
    assert line.applied(line.manifests[versions[1]].ref, edges) == line.models[versions[4]]


def test_the_newest_version_besides_refused_ones(line: Any, store: MemoryStore) -> None:
    line.open()
    versions = line.many(3)
    weights.quarantine(store, versions[2], reason="r")
    assert weights.newest_version(store, besides=weights.list_quarantined(store)) == versions[1]
