"""A copy on disk: bit for bit a published version, whatever was in the way."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from etude.common import weights
from etude.common.blobs import MemoryStore, MissingError, Store
from etude.common.errors import CorruptError
from etude.common.weights import PayloadObject, Stats, VersionId, VersionRef, WeightManifest, digest
from etude.common.weights.digest import NOTHING, Digest
from etude.common.weights.mirror import Mirror
from etude.common.weights.packing import Packed, Packer, Shard, words_of
from etude.common.weights.schema import Schema, TensorSpec
from etude.common.weights.tiles import tiling
from etude.common.weights.words import Words, word_type

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="experts", dtype="BF16", shape=(2, 64, 33), split="rows"),
        TensorSpec(name="none", dtype="F32", shape=(0, 7), split="rows"),
        TensorSpec(name="norm", dtype="F32", shape=(65,), split="rows"),
        TensorSpec(name="o_proj.weight", dtype="BF16", shape=(300, 1024), split="columns"),
    ),
)


@dataclass
class Author:
    """Publishes arrays as a trainer of one rank does."""

    store: Store
    schema: Schema = SCHEMA
    seed: int = 0
    words: dict[str, Words] = field(default_factory=dict)
    manifest: WeightManifest | None = None

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        for spec in self.schema.tensors:
            word = word_type(spec.dtype)
            self.words[spec.name] = rng.integers(0, 2**14, spec.elements).astype(word)
        weights.put_schema(self.store, self.schema.to_bytes(), self.schema.sha256)

    def open(self, parent: VersionId | None = None, reason: str = "start") -> int:
        return weights.claim_epoch(self.store, holder="t", parent=parent, reason=reason)

    def complete(self, version: VersionId) -> WeightManifest:
        with Packer(self.schema) as packer:
            for place, spec in enumerate(self.schema.tensors):
                packer.add_complete(place, self.words[spec.name], Shard(0, spec.elements))
            packed = packer.finish()
        return self._commit(version, packed, None, NOTHING)

    def delta(self, version: VersionId, *, density: float = 0.01) -> WeightManifest:
        rng = np.random.default_rng(version.number)
        with Packer(self.schema) as packer:
            for place, spec in enumerate(self.schema.tensors):
                old = self.words[spec.name]
                new = old ^ (rng.random(old.size) < density).astype(old.dtype)
                flat = np.flatnonzero(old != new)
                shard = Shard(0, spec.elements)
                words = words_of(new, shard, tiling(spec, self.schema.grid))
                packer.add_changes(place, flat, old[flat], new[flat], shard, block_words=words)
                self.words[spec.name] = new
            packed = packer.finish()
        assert self.manifest is not None
        base = self.manifest.ref
        return self._commit(version, packed, base, Digest.parse(base.state))

    def _commit(
        self, version: VersionId, packed: Packed, base: VersionRef | None, before: Digest
    ) -> WeightManifest:
        made = packed.container
        key = weights.publish_payload(
            self.store, version, 0, bytes(made.data), complete=base is None
        )
        self.manifest = weights.commit(
            self.store,
            WeightManifest(
                run="run-1",
                epoch=version.epoch,
                number=version.number,
                step=version.number,
                holder="t",
                base=base,
                schema_sha256=self.schema.sha256,
                state=before.plus(packed.digest).hex(),
                objects=(
                    PayloadObject(
                        rank=0,
                        key=key,
                        size=made.size,
                        index_offset=made.index_offset,
                        index_length=made.index_length,
                        index_sha256=made.index_sha256,
                    ),
                ),
                stats=Stats(**packed.stats._asdict()),
            ),
        )
        return self.manifest

    def is_in(self, mirror: Mirror) -> bool:
        same = (np.array_equal(mirror.words[name], words) for name, words in self.words.items())
        return all(same) and mirror.words.keys() == self.words.keys()


@pytest.fixture
def author() -> Author:
    made = Author(MemoryStore())
    made.open()
    made.complete(VersionId(1, 0))
    return made


def test_a_copy_follows_the_chain_bit_for_bit(author: Author, tmp_path: Path) -> None:
    mirror = Mirror(author.store, tmp_path / "m", run="run-1")
    for number in range(1, 4):
        manifest = author.delta(VersionId(1, number))
        mirror.move_to(manifest.version)
        assert mirror.ref == manifest.ref
        assert mirror.scan().hex() == manifest.state
        assert author.is_in(mirror)


def test_a_copy_is_found_again_by_the_next_process(author: Author, tmp_path: Path) -> None:
    Mirror(author.store, tmp_path / "m").move_to(VersionId(1, 0))
    again = Mirror(author.store, tmp_path / "m")
    assert again.ref is not None
    assert again.ref.version == VersionId(1, 0)
    assert again.move_to(VersionId(1, 0)) == []
    assert author.is_in(again)


def test_a_copy_that_was_damaged_on_disk_starts_afresh(author: Author, tmp_path: Path) -> None:
    Mirror(author.store, tmp_path / "m").move_to(VersionId(1, 0))
    data = bytearray((tmp_path / "m" / "words").read_bytes())
    data[1000] ^= 1
    (tmp_path / "m" / "words").write_bytes(data)
    again = Mirror(author.store, tmp_path / "m")
    assert again.ref is None
    assert [edge.kind for edge in again.move_to(VersionId(1, 0))] == ["complete"]
    assert author.is_in(again)


def test_a_process_killed_half_way_leaves_no_half_version(author: Author, tmp_path: Path) -> None:
    mirror = Mirror(author.store, tmp_path / "m")
    mirror.move_to(VersionId(1, 0))
    version = author.delta(VersionId(1, 1)).version

    def killed(*_: object) -> None:
        mirror._drop_label()
        mirror.words["norm"][:10] = 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mirror.move_to(version, killed)
    again = Mirror(author.store, tmp_path / "m")
    assert again.ref is None
    again.move_to(version)
    assert author.is_in(again)


def test_a_version_of_another_run_is_refused(author: Author, tmp_path: Path) -> None:
    mirror = Mirror(author.store, tmp_path / "m", run="run-2")
    with pytest.raises(CorruptError, match="of run run-1, not run-2"):
        mirror.move_to(VersionId(1, 0))
    assert mirror.ref is None


def test_a_new_schema_replaces_the_old_words(author: Author, tmp_path: Path) -> None:
    mirror = Mirror(author.store, tmp_path / "m")
    mirror.move_to(VersionId(1, 0))
    wider = SCHEMA.tensors[2].model_copy(update={"shape": (70,)})
    other = Author(author.store, Schema(grid=2, tensors=(*SCHEMA.tensors[:2], wider)), seed=5)
    other.complete(VersionId(1, 1))
    mirror.move_to(VersionId(1, 1))
    assert other.is_in(mirror)


def test_a_roll_back_and_a_resume_lead_to_what_counts_now(author: Author, tmp_path: Path) -> None:
    mirror = Mirror(author.store, tmp_path / "m")
    at_start = dict(author.words)
    base = author.manifest
    mirror.move_to(author.delta(VersionId(1, 1)).version)
    author.open(VersionId(1, 0), "rollback")
    author.words, author.manifest = at_start, base
    mirror.move_to(author.delta(VersionId(2, 2), density=0.1).version)
    assert author.is_in(mirror)
    assert mirror.scan() == Digest.parse(author.manifest.state if author.manifest else "")


def test_a_missing_payload_leaves_what_was_there(author: Author, tmp_path: Path) -> None:
    mirror = Mirror(author.store, tmp_path / "m")
    mirror.move_to(VersionId(1, 0))
    before = {name: words.copy() for name, words in mirror.words.items()}
    lost = author.delta(VersionId(1, 1))
    author.store.delete([lost.objects[0].key])
    with pytest.raises(MissingError):
        mirror.move_to(VersionId(1, 1))
    assert mirror.ref is not None
    assert mirror.ref.version == VersionId(1, 0)
    assert all(np.array_equal(mirror.words[name], words) for name, words in before.items())
    assert digest.scan(mirror.words["norm"], 0) == digest.scan(before["norm"], 0)
