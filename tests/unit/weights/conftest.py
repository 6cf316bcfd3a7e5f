"""A store, and a line of small versions in it."""

import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import (
    Edge,
    Keyframe,
    PayloadObject,
    Skip,
    Stats,
    VersionId,
    VersionRef,
    WeightManifest,
)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


Model = tuple[int, ...]


@dataclass
class Line:
    """Publishes models of a few small numbers; a payload says which become what, as JSON."""

    store: MemoryStore
    models: dict[VersionId, Model] = field(default_factory=dict)
    manifests: dict[VersionId, WeightManifest] = field(default_factory=dict)
    schema: str = ""

    def open(self, parent: VersionId | None = None, reason: str = "start") -> int:
        self.schema = hashlib.sha256(b"schema").hexdigest()
        weights.put_schema(self.store, b"schema", self.schema)
        return weights.claim_epoch(self.store, holder="trainer-0", parent=parent, reason=reason)

    def manifest(
        self,
        version: VersionId,
        model: Model,
        *,
        base: VersionId | None = None,
        pad: int = 0,
        **changed: Any,
    ) -> WeightManifest:
        """Uploads the payload; the manifest is not committed."""
        data = self.payload(None if base is None else self.models[base], model, pad)
        key = weights.publish_payload(self.store, version, 0, data, complete=base is None)
        fields: dict[str, Any] = {
            "run": "run-1",
            "epoch": version.epoch,
            "number": version.number,
            "step": version.number,
            "holder": "trainer-0",
            "base": None if base is None else self.manifests[base].ref,
            "schema_sha256": self.schema,
            "state": self.state(model),
            "objects": (self.described(key, data),),
            "stats": self.stats(),
        }
        return WeightManifest(**(fields | changed))

    def publish(
        self,
        version: VersionId,
        model: Model,
        *,
        base: VersionId | None = None,
        pad: int = 0,
        **changed: Any,
    ) -> WeightManifest:
        found = weights.publish_manifest(
            self.store, self.manifest(version, model, base=base, pad=pad, **changed)
        )
        self.models[version], self.manifests[version] = model, found
        return found

    def many(self, count: int, *, epoch: int = 1, pad: int = 0) -> list[VersionId]:
        """A complete version 0 of 1,000 bytes, then deltas, all in one epoch."""
        versions = [VersionId(epoch, number) for number in range(count)]
        self.publish(versions[0], (0, 0, 0), pad=1_000)
        for before, version in itertools.pairwise(versions):
            self.publish(version, (version.number, 0, epoch), base=before, pad=pad)
        return versions

    def skip(self, base: VersionId, target: VersionId, *, pad: int = 0, **changed: Any) -> Skip:
        data = self.payload(self.models[base], self.models[target], pad)
        key = weights.publish_skip_part(self.store, base, target, 0, data)
        fields: dict[str, Any] = {
            "run": "run-1",
            "base": self.manifests[base].ref,
            "target": self.manifests[target].ref,
            "schema_sha256": self.schema,
            "objects": (self.described(key, data),),
            "stats": self.stats(),
        }
        return weights.publish_folded(self.store, Skip(**(fields | changed)))

    def keyframe(self, version: VersionId, *, pad: int = 1_000, **changed: Any) -> Keyframe:
        data = self.payload(None, self.models[version], pad)
        key = weights.publish_keyframe_part(self.store, version, 0, data)
        fields: dict[str, Any] = {
            "run": "run-1",
            "target": self.manifests[version].ref,
            "schema_sha256": self.schema,
            "objects": (self.described(key, data),),
            "stats": self.stats(),
        }
        return weights.publish_folded(self.store, Keyframe(**(fields | changed)))

    def applied(self, live: VersionRef | None, edges: list[Edge]) -> Model:
        """What a replica has after a plan, every edge checked as a replica checks it."""
        model: Model = () if live is None else self.models[live.version]
        for edge in edges:
            if edge.base is not None:
                assert edge.base.state == self.state(model)
            for item in edge.objects:
                content = json.loads(self.store.get(item.key))
                if edge.base is None:
                    model = (0,) * len(content)
                values = list(model)
                for place, value in content.items():
                    values[int(place)] = value
                model = tuple(values)
            assert edge.target.state == self.state(model)
        return model

    @staticmethod
    def payload(old: Model | None, new: Model, pad: int) -> bytes:
        changed = {p: v for p, v in enumerate(new) if old is None or old[p] != v}
        return json.dumps(changed).encode() + b" " * pad

    @staticmethod
    def state(model: Model) -> str:
        return hashlib.blake2b(repr(model).encode(), digest_size=16).hexdigest()

    @staticmethod
    def described(key: str, data: bytes, rank: int = 0) -> PayloadObject:
        return PayloadObject(
            rank=rank,
            key=key,
            size=len(data),
            index_offset=0,
            index_length=1,
            index_sha256="0" * 64,
        )

    @staticmethod
    def stats() -> Stats:
        return Stats(changed=0, elements=3, one_ulp=0, nonfinite=0, codecs={}, num_bytes=0)


@pytest.fixture
def line(store: MemoryStore) -> Line:
    return Line(store)
