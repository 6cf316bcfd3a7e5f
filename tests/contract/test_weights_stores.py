"""Publishing, fencing, planning, reading and deleting are the same on every object store."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from typing_extensions import Buffer, override

from etude.common import weights
from etude.common.blobs import MemoryStore, ObjectInfo, Store
from etude.common.errors import EtudeError, FencedError
from etude.common.weights import (
    Edge,
    GarbageCollector,
    Keyframe,
    PayloadObject,
    QuarantinedVersionError,
    ReaderLease,
    Retention,
    Skip,
    Stats,
    VersionId,
    VersionRef,
    WeightManifest,
)

T = TypeVar("T")


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


def test_an_empty_store_has_no_version(store: Store) -> None:
    assert weights.newest_version(store) is None
    assert weights.accepted_chain(store) == []
    assert not weights.is_accepted(store, VersionId(1, 0))


def test_a_line_of_versions_is_published_taken_over_and_read(store: Store) -> None:
    weights.put_schema(store, b"schema", SCHEMA)
    assert weights.claim_epoch(store, holder="a", parent=None, reason="start") == 1
    refs: list[VersionRef] = []
    for number in range(3):
        refs.append(commit_delta(store, VersionId(1, number), refs[-1] if refs else None))
    assert weights.claim_epoch(store, holder="b", parent=VersionId(1, 1), reason="takeover") == 2
    with pytest.raises(FencedError):
        commit_delta(store, VersionId(1, 3), refs[2])
    newest = VersionId(2, 3)
    assert commit_delta(store, newest, refs[1]) == commit_delta(store, newest, refs[1])
    assert weights.accepted_chain(store) == [VersionId(1, 0), VersionId(1, 1), newest]
    assert weights.newest_version(store) == newest
    assert [read(store, edge) for edge in weights.plan_path(store, None, newest)] == [
        b"1.0" * 20,
        b"1.1",
        b"2.3",
    ]


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
    weights.put_schema(store, b"schema", SCHEMA)
    outcomes: list[str] = []

    def race(content: str) -> None:
        try:
            commit_delta(store, VersionId(1, 0), None, content)
        except EtudeError as error:
            outcomes.append(error.reason)
        else:
            outcomes.append("published")

    threads = [threading.Thread(target=race, args=(f"content {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["Fenced"] * 7 + ["published"]
    [edge] = weights.plan_path(store, None, VersionId(1, 0))
    assert edge.objects[0].size == len(read(store, edge))


@dataclass
class Recorded(Store):
    """Writes down each call and its answer, without what differs between stores."""

    inner: Store
    url: str = ""
    history: list[tuple[object, ...]] = field(default_factory=list)

    def _record(
        self, call: str, key: object, act: Callable[[], T], shown: Callable[[T], object]
    ) -> T:
        try:
            found = act()
        except EtudeError as error:
            self.history.append((call, key, error.reason))
            raise
        self.history.append((call, key, shown(found)))
        return found

    @override
    def get(self, key: str) -> bytes:
        return self._record("get", key, lambda: self.inner.get(key), bytes)

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._record("range", key, lambda: self.inner.get_range(key, start, length), bytes)

    @override
    def put(self, key: str, data: Buffer) -> None:
        self._record("put", (key, bytes(data)), lambda: self.inner.put(key, data), repr)

    @override
    def create(self, key: str, data: bytes) -> None:
        self._record("create", (key, data), lambda: self.inner.create(key, data), repr)

    @override
    def head(self, key: str) -> ObjectInfo | None:
        return self._record(
            "head", key, lambda: self.inner.head(key), lambda found: found and found[:2]
        )

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        found = self._record(
            "list",
            (prefix, after),
            lambda: [*self.inner.list(prefix, after)],
            lambda found: [info[:2] for info in found],
        )
        return iter(found)

    @override
    def delete(self, keys: Sequence[str]) -> None:
        self._record("delete", tuple(keys), lambda: self.inner.delete(keys), repr)


SCHEMA = hashlib.sha256(b"schema").hexdigest()


def commit_delta(
    store: Store, version: VersionId, base: VersionRef | None, content: str = ""
) -> VersionRef:
    """A version whose payload is its own name, unless told."""
    data = (content or str(version)).encode() * (20 if base is None else 1)
    key = weights.publish_payload(store, version, 0, data, complete=base is None)
    manifest = WeightManifest(
        run="r",
        epoch=version.epoch,
        number=version.number,
        step=version.number,
        holder="h",
        base=base,
        schema_sha256=SCHEMA,
        state=hashlib.blake2b(data, digest_size=16).hexdigest(),
        objects=(described(key, data),),
        stats=STATS,
    )
    assert weights.publish_manifest(store, manifest) == weights.publish_manifest(store, manifest)
    return manifest.ref


def read(store: Store, edge: Edge) -> bytes:
    """All payloads of one step."""
    return b"".join(store.get(item.key) for item in edge.objects)


STATS = Stats(changed=0, elements=1, one_ulp=0, nonfinite=0, codecs={}, num_bytes=0)


def described(key: str, data: bytes) -> PayloadObject:
    return PayloadObject(
        rank=0, key=key, size=len(data), index_offset=0, index_length=1, index_sha256="0" * 64
    )


def fold(store: Store, base: VersionRef, target: VersionRef) -> None:
    common = {"run": "r", "schema_sha256": SCHEMA, "stats": STATS, "target": target}
    key = weights.publish_skip_part(store, base.version, target.version, 0, b"skip")
    objects = (described(key, b"skip"),)
    weights.publish_folded(store, Skip.model_validate(common | {"base": base, "objects": objects}))
    key = weights.publish_keyframe_part(store, target.version, 0, b"keyframe")
    objects = (described(key, b"keyframe"),)
    weights.publish_folded(store, Keyframe.model_validate(common | {"objects": objects}))


def history(inner: Store) -> list[tuple[object, ...]]:
    """From publishing to deleting, with a take-over, a refused version and a slow reader."""
    store = Recorded(inner)
    weights.put_schema(store, b"schema", SCHEMA)
    assert weights.claim_epoch(store, holder="a", parent=None, reason="start") == 1
    refs: list[VersionRef] = []
    for number in range(6):
        refs.append(commit_delta(store, VersionId(1, number), refs[-1] if refs else None))
    fold(store, refs[0], refs[3])
    slow = ReaderLease(store, "slow", _serial=7)
    assert [edge.kind for edge in slow.plan_path(VersionId(1, 4))] == ["keyframe", "delta"]
    weights.quarantine(store, VersionId(1, 5), reason="r")
    assert weights.claim_epoch(store, holder="b", parent=VersionId(1, 4), reason="rollback") == 2
    with pytest.raises(FencedError):
        commit_delta(store, VersionId(1, 6), refs[4])
    refs.append(commit_delta(store, VersionId(2, 6), refs[4]))
    assert weights.newest_version(store) == VersionId(2, 6)
    with pytest.raises(QuarantinedVersionError):
        weights.plan_path(store, refs[4], VersionId(1, 5))
    assert [edge.kind for edge in weights.plan_path(store, refs[0], VersionId(2, 6))] == [
        "skip",
        "delta",
        "delta",
    ]
    collector = GarbageCollector(
        store=store,
        epoch=2,
        resumable=lambda: (),
        retention=Retention(versions=1, keyframes=1),
    )
    assert len(collector.collect()) == 10
    assert [edge.kind for edge in slow.plan_path(VersionId(2, 6))] == ["keyframe", "delta", "delta"]
    assert weights.accepted_chain(store) == [VersionId(1, 3), VersionId(1, 4), VersionId(2, 6)]
    return store.history


def without_chance(calls: list[tuple[object, ...]]) -> str:
    """Identifiers that are drawn anew each time, by the order in which they come."""
    text = repr(calls)
    drawn = dict.fromkeys(
        re.findall(r"weights/trash/([0-9a-f]{32})|nonce\":\"([0-9a-f]{32})", text)
    )
    for place, found in enumerate(drawn):
        text = text.replace("".join(found), f"drawn-{place}")
    # A record's seal covers what was drawn.
    return re.sub(r"\"blake3\":\"[0-9a-f]{64}\"", "", text)


def test_the_whole_path_of_a_version_is_the_same_calls_on_every_store(store: Store) -> None:
    assert without_chance(history(store)) == without_chance(history(MemoryStore()))
