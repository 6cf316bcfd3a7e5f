"""A policy as a trainer holds it, published by the real packer: the oracle is its own words."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from etude.common import weights
from etude.common.blobs import Store
from etude.common.weights import VersionId, WeightManifest
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.protocol.manifest import PayloadObject, Stats, VersionRef
from etude.common.weights.replicas import staged_file
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.changes import diff_words
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words, word_type
from etude.trainer.export.delta_packer import PackedContainer, Packer, Shard, shard_words


class TrainedPolicy:
    """Words of every tensor, stepped at random; each publish is a version of the run."""

    def __init__(
        self,
        schema: Schema,
        words: Mapping[str, Words] | None = None,
        *,
        seed: int = 0,
        codec: Codec = Codec.L1,
    ) -> None:
        self.schema = schema
        self.codec = codec
        self.random = np.random.default_rng(seed)
        self.words = {
            spec.name: words[spec.name].copy()
            if words is not None
            else self._drawn(spec.elements, word_type(spec.dtype))
            for spec in schema.tensors
        }
        self.published: dict[VersionId, dict[str, Words]] = {}
        """The words of each version, for comparison."""
        self.base: VersionRef | None = None
        """What the next delta builds on."""

    def _drawn(self, elements: int, word: np.dtype[np.unsignedinteger]) -> Words:
        top = np.iinfo(word).max
        return self.random.integers(0, top, elements, word.type, endpoint=True).astype(word)

    def step(self, share: float = 0.1) -> None:
        """Change some of the elements, most of them by one."""
        for words in self.words.values():
            chosen = self.random.random(words.size) < share
            words[chosen] += self.random.choice([1, 1, 1, 2, 500], words.size)[chosen].astype(
                words.dtype
            )

    def state(self) -> Digest:
        """The state digest, from all words."""
        total = digest.ZERO
        for place, spec in enumerate(self.schema.tensors):
            words = self.words[spec.name]
            total = total.plus(digest.scan(words, self.schema.offsets[place]))
        return total

    def publish(
        self,
        store: Store,
        number: int,
        *,
        epoch: int = 1,
        complete: bool = False,
        run: str = "uid-run",
        state: str | None = None,
    ) -> WeightManifest:
        """Make the present words a version; a delta on the last one unless complete."""
        base = None if complete else self.base
        version = VersionId(epoch, number)
        packed = self.packed(base)
        weights.put_schema(store, self.schema.to_bytes(), self.schema.sha256)
        item = payload(store, version, packed, complete=base is None)
        manifest = WeightManifest(
            run=run,
            epoch=epoch,
            number=number,
            step=number,
            holder="trainer-0",
            base=base,
            schema_sha256=self.schema.sha256,
            state=state or self.state().hex(),
            objects=(item,),
            stats=Stats(**packed.stats._asdict()),
        )
        weights.publish_manifest(store, manifest)
        self.published[version] = {name: words.copy() for name, words in self.words.items()}
        self.base = manifest.ref
        return manifest

    def resume(self, ref: VersionRef) -> None:
        """Go on from an older version, as after a crash."""
        self.words = {name: words.copy() for name, words in self.published[ref.version].items()}
        self.base = ref

    def packed(self, base: VersionRef | None) -> PackedContainer:
        """What leads from a published version, or from nothing, to the present words."""
        old = None if base is None else self.published[base.version]
        with Packer(self.schema, codec=self.codec) as packer:
            for place, spec in enumerate(self.schema.tensors):
                new, shard = self.words[spec.name].copy(), Shard(0, spec.elements)
                if old is None:
                    packer.add_complete(place, new, shard)
                    continue
                flat = np.flatnonzero(old[spec.name] != new)
                packer.add_changes(
                    place,
                    flat,
                    old[spec.name][flat],
                    new[flat],
                    shard,
                    block_words=shard_words(new, shard, tiling(spec, self.schema.grid)),
                )
            return packer.finish()

    def stage(self, path: Path, old: Mapping[str, Words] | None) -> None:
        """Write the blocks that a receiver would have staged, without a store."""
        staged_file.write_blocks(path, list(self.blocks(old)))

    def blocks(self, old: Mapping[str, Words] | None) -> list[StagedBlock]:
        """One block per tensor: tests keep tensors below the size of a tile."""
        found = []
        for place, spec in enumerate(self.schema.tensors):
            new = self.words[spec.name].copy()
            if old is None:
                found.append(StagedBlock(place, 0, 0, spec.elements, Codec.DENSE, None, new))
                continue
            changes = diff_words(old[spec.name], new, ordered=spec.is_ordered)
            if changes.index.size:
                block = StagedBlock(place, 0, 0, spec.elements, Codec.L1, *changes)
                found.append(block)
        return found


def payload(
    store: Store, version: VersionId, packed: PackedContainer, *, complete: bool
) -> PayloadObject:
    """Upload a container as the only rank's."""
    made = packed.container
    key = weights.publish_payload(store, version, 0, made.data, complete=complete)
    return PayloadObject(
        rank=0,
        key=key,
        size=made.size,
        index_offset=made.index_offset,
        index_length=made.index_length,
        index_sha256=made.index_sha256,
    )
