"""A compactor beside a policy that is trained at random."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.common import weights
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import MemoryStore, Store
from etude.common.weights import VersionId, VersionRef, WeightManifest
from etude.common.weights.protocol.manifest import PayloadObject, Stats
from etude.common.weights.replicas.mirror import Mirror
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words, word_type
from etude.trainer.compactor.compactor import Compactor, CompactorConfig
from etude.trainer.export.delta_packer import Packer, Shard, shard_words

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="experts", dtype="BF16", shape=(2, 64, 33), split="rows"),
        TensorSpec(name="none", dtype="F32", shape=(0, 7), split="rows"),
        TensorSpec(name="norm", dtype="F32", shape=(65,), split="rows"),
        TensorSpec(name="o_proj.weight", dtype="BF16", shape=(300, 128), split="columns"),
    ),
)


@dataclass
class Trained:
    """Publishes arrays as a trainer of one rank does."""

    store: Store
    schema: Schema = SCHEMA
    words: dict[str, Words] = field(default_factory=dict)
    manifest: WeightManifest | None = None
    of: dict[VersionId, dict[str, Words]] = field(default_factory=dict)
    """The words of each version: what every copy is compared with."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        for spec in self.schema.tensors:
            word = word_type(spec.dtype)
            self.words[spec.name] = rng.integers(0, 2**14, spec.elements).astype(word)
        weights.put_schema(self.store, self.schema.to_bytes(), self.schema.sha256)

    def open(self, parent: VersionId | None = None, reason: str = "start") -> int:
        return weights.claim_epoch(self.store, holder="t", parent=parent, reason=reason)

    def back_to(self, version: VersionId) -> None:
        """As after a crash: the next version builds on this one."""
        self.words = dict(self.of[version])
        self.manifest = weights.read_manifest(self.store, version)

    def publish(
        self, number: int, *, epoch: int = 1, density: float = 0.01, complete: bool = False
    ) -> WeightManifest:
        rng = np.random.default_rng(number)
        base = None if complete or self.manifest is None else self.manifest.ref
        with Packer(self.schema, threads=1) as packer:
            for place, spec in enumerate(self.schema.tensors):
                shard, old = Shard(0, spec.elements), self.words[spec.name]
                if base is None:
                    packer.add_complete(place, old, shard)
                    continue
                step = rng.choice([1, 1, 2, 300], old.size) * (rng.random(old.size) < density)
                new = (old + step.astype(old.dtype)).astype(old.dtype)
                flat = np.flatnonzero(old != new)
                cut = shard_words(new, shard, tiling(spec, self.schema.grid))
                packer.add_changes(place, flat, old[flat], new[flat], shard, block_words=cut)
                self.words[spec.name] = new
            packed = packer.finish()
        return self._committed(VersionId(epoch, number), packed, base)

    def _committed(
        self, version: VersionId, packed: Any, base: VersionRef | None
    ) -> WeightManifest:
        made = packed.container
        key = weights.publish_payload(self.store, version, 0, made.data, complete=base is None)
        before = ZERO if base is None else Digest.parse(base.state)
        item = PayloadObject(
            rank=0,
            key=key,
            size=made.size,
            index_offset=made.index_offset,
            index_length=made.index_length,
            index_sha256=made.index_sha256,
        )
        manifest = WeightManifest(
            run="run",
            epoch=version.epoch,
            number=version.number,
            step=version.number,
            holder="t",
            base=base,
            schema_sha256=self.schema.sha256,
            state=before.plus(packed.digest).hex(),
            objects=(item,),
            stats=Stats(**packed.stats._asdict()),
        )
        self.manifest = weights.publish_manifest(self.store, manifest)
        self.of[version] = dict(self.words)
        return self.manifest

    def is_state(self, version: VersionId, state: str) -> bool:
        """Whether a digest is that of the words that were published."""
        total = ZERO
        for place, spec in enumerate(self.schema.tensors):
            words = self.of[version][spec.name]
            total = total.plus(digest.scan(words, self.schema.offsets[place]))
        return total.hex() == state

    def is_in(self, mirror: Mirror) -> bool:
        assert mirror.ref is not None
        words = self.of[mirror.ref.version]
        return all(np.array_equal(mirror.tensor_words[name], words[name]) for name in words)


def settings(*, every: int = 100, encoding: str = "Auto", **advanced: object) -> Weights:
    """Of a run, with the names of the API; nothing is folded without being asked for."""
    quiet = {"chainRatio": "1000", "skips": []} if encoding != "Full" else {}
    return Weights.model_validate(
        {"keyframeEverySteps": every, "encoding": encoding, "advanced": {**quiet, **advanced}}
    )


@pytest.fixture
def trained() -> Trained:
    """A run in its first epoch, with a complete version 0."""
    made = Trained(MemoryStore())
    made.open()
    made.publish(0)
    return made


@pytest.fixture
def keep(tmp_path: Path) -> Callable[..., Compactor]:
    """A compactor over a store; further arguments are settings."""

    def make(
        store: Store,
        *,
        epoch: int = 1,
        folder: str = "compactor",
        part_bytes: int = 1 << 20,
        clock: Callable[[], float] = lambda: 0.0,
        collect_every_s: float = 0.0,
        **given: Any,
    ) -> Compactor:
        config = CompactorConfig(
            run="run",
            epoch=epoch,
            storage=Storage.model_validate({"uri": "file:///unused"}),
            folder=tmp_path / folder,
            weights=settings(**given),
            collect_every_s=collect_every_s,
            retry_s=0.0,
            part_bytes=part_bytes,
        )
        return Compactor(config, store=store, clock=clock)

    return make
