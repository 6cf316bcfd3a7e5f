"""Reading from a store: just what is wanted, verified, and read twice before it is given up."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.support.stores.counting_store import CountingStore
from tests.support.weights.live_words import tile_words

from etude.common.blobs import MissingError
from etude.common.errors import CorruptError
from etude.common.weights.coding.block_index import BlockRow
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.protocol.manifest import PayloadObject, VersionRef
from etude.common.weights.protocol.plan import Edge
from etude.common.weights.replicas import staged_file
from etude.common.weights.replicas.block_reader import (
    MAX_REQUEST_BYTES,
    read_blocks,
    select_regions,
    select_slice,
    stage,
)
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions, slice_regions
from etude.common.weights.replicas.regions import Region
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words
from etude.trainer.export.delta_packer import Packer, Shard, shard_words

Weights = dict[str, Words]


def spec(name: str, shape: tuple[int, ...], split: str = "rows") -> TensorSpec:
    return TensorSpec(name=name, dtype="BF16", shape=shape, split=split)  # type: ignore[arg-type]


SCHEMA = Schema(
    grid=8,
    tensors=(
        spec("down", (512, 8192), "columns"),
        spec("experts", (2, 2048, 640)),
        spec("norm", (1024,)),
        spec("up", (8192, 512)),
    ),
)


class Version(NamedTuple):
    store: CountingStore
    old: Weights
    new: Weights
    edge: Edge

    @property
    def objects(self) -> tuple[PayloadObject, ...]:
        return self.edge.objects


def version(codec: Codec = Codec.L1, *, ranks: int = 2, density: float = 0.01) -> Version:
    """A version in a store, published by some ranks."""
    rng = np.random.default_rng(3)
    old: Weights = {s.name: rng.integers(0, 30_000, s.elements, np.uint16) for s in SCHEMA.tensors}
    new = {n: w + (rng.random(w.size) < density).astype(np.uint16) for n, w in old.items()}
    store = CountingStore()
    objects = []
    for rank in range(ranks):
        with Packer(SCHEMA, codec=codec) as packer:
            for tensor, each in enumerate(SCHEMA.tensors):
                shard = Shard(each.elements * rank // ranks, each.elements * (rank + 1) // ranks)
                before, after = (w[each.name][shard.start : shard.stop] for w in (old, new))
                at = np.flatnonzero(before != after)
                words = shard_words(after, shard, tiling(each, SCHEMA.grid))
                packer.add_changes(
                    tensor, at + shard.start, before[at], after[at], shard, block_words=words
                )
            made = packer.finish().container
        key = f"deltas/r{rank}"
        store.put(key, made.data)
        objects.append(
            PayloadObject(
                rank=rank,
                key=key,
                size=made.size,
                index_offset=made.index_offset,
                index_length=made.index_length,
                index_sha256=made.index_sha256,
            )
        )
    target = VersionRef(epoch=1, number=1, manifest_sha256="0" * 64, state="0" * 32)
    return Version(store, old, new, Edge("delta", None, target, "0" * 64, tuple(objects)))


@pytest.mark.parametrize("codec", list(Codec))
def test_a_staged_version_is_the_published_one(codec: Codec, tmp_path: Path) -> None:
    made = version(codec)
    size = stage(made.store, made.edge, SCHEMA, tmp_path / "staged")
    assert size == made.store.asked_bytes
    memory = {name: words.copy() for name, words in made.old.items()}
    live = LiveWeights(SCHEMA, memory, identity_regions(SCHEMA))
    assert live.write(live.prepare(staged_file.read_staged(tmp_path / "staged")))
    assert all(np.array_equal(memory[name], made.new[name]) for name in memory)


@pytest.mark.parametrize("codec", [Codec.L1, Codec.L2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_slice_reads_its_own_blocks_and_nothing_else(
    codec: Codec, ranks: int, tmp_path: Path
) -> None:
    made = version(codec)
    everything = sum(item.size for item in made.objects)
    for rank in range(ranks):
        made.store.asked.clear()
        wanted = select_slice(SCHEMA, rank, ranks)
        size = stage(made.store, made.edge, SCHEMA, tmp_path / "staged", wanted)
        assert size <= 1.1 / ranks * everything
        memory = cut(made.old, rank, ranks)
        live = LiveWeights(SCHEMA, memory, slice_regions(SCHEMA, rank, ranks))
        assert live.write(live.prepare(staged_file.read_staged(tmp_path / "staged")))
        expected = cut(made.new, rank, ranks)
        assert all(np.array_equal(memory[name], expected[name]) for name in memory)


def cut(words: Weights, rank: int, ranks: int) -> Weights:
    found = {}
    for each in SCHEMA.tensors:
        part = words[each.name].reshape(each.shape)
        if part.ndim > 1:
            part = np.split(part, ranks, axis=-1 if each.split == "columns" else -2)[rank]
        found[each.name] = part.ravel().copy()
    return found


def holders(row: BlockRow, ranks: int) -> set[int]:
    """The ranks that hold elements of a block; all of them where a tensor is not cut."""
    each = SCHEMA.tensors[row.tensor]
    owner = np.full(each.shape, ranks, np.uint8)
    if len(each.shape) > 1:
        parts = np.split(owner, ranks, axis=-1 if each.split == "columns" else -2)
        for rank, part in enumerate(parts):
            part[...] = rank
    found = set(tile_words(SCHEMA, row.tensor, row.tile, owner)[row.lo : row.hi].tolist())
    return set(range(ranks)) if found == {ranks} else found


@examples(max_examples=5)
@given(
    publishers=st.integers(1, 3),
    ranks=st.sampled_from([2, 4, 8]),
    density=st.sampled_from([0.0001, 0.003, 0.05]),
)
def test_the_slices_of_all_ranks_are_the_delta_and_only_what_none_of_them_cuts_is_read_by_all(
    publishers: int, ranks: int, density: float
) -> None:
    made = version(ranks=publishers, density=density)
    indexes = {item.index_offset: item.index_length for item in made.objects}
    everything = [b.row for b in read_blocks(made.store, made.objects, SCHEMA)]
    for rank in range(ranks):
        made.store.asked.clear()
        wanted = select_slice(SCHEMA, rank, ranks)
        found = [b.row for b in read_blocks(made.store, made.objects, SCHEMA, wanted=wanted)]
        due = [row for row in everything if rank in holders(row, ranks)]
        assert sorted(found) == sorted(due)
        read = sum(row.length for row in due) + sum(indexes.values())
        assert made.store.asked_bytes == read < sum(item.size for item in made.objects)
    assert {len(holders(row, ranks)) for row in everything} <= {1, ranks}


def test_regions_that_lie_across_tiles_get_all_the_blocks_that_they_meet() -> None:
    made = version()
    # 3 columns on either side of a panel's edge, and one row of a matrix of many.
    regions = {
        0: [Region("x", 0, 1021, 512, 6, 6, 8192)],
        3: [Region("y", 0, 700 * 512, 1, 512, 512, 512)],
    }
    wanted = select_regions(SCHEMA, regions)
    found = list(read_blocks(made.store, made.objects, SCHEMA, wanted=wanted))
    down, up = (tiling(SCHEMA.tensors[n], SCHEMA.grid) for n in (0, 3))
    expected = {(0, n) for n in range(down.tiles) if down.tile(n).column in {0, 1024}}
    rows = [up.tile(n) for n in range(up.tiles)]
    expected |= {(3, n) for n, t in enumerate(rows) if t.row <= 700 < t.row + t.rows}
    assert {block.row[:2] for block in found} == expected


def test_neighbouring_blocks_come_in_one_request() -> None:
    made = version(ranks=1)
    blocks = list(read_blocks(made.store, made.objects, SCHEMA))
    assert len(blocks) > 30
    assert len(made.store.asked) == 2
    item = made.objects[0]
    assert made.store.asked[1] == (item.key, 0, item.index_offset)
    assert item.index_offset < MAX_REQUEST_BYTES


def test_requests_stay_below_their_limit() -> None:
    made = version(Codec.DENSE, density=0.5, ranks=1)
    assert made.objects[0].index_offset > MAX_REQUEST_BYTES
    blocks = list(read_blocks(made.store, made.objects, SCHEMA))
    assert all(length <= MAX_REQUEST_BYTES for _, _, length in made.store.asked)
    assert sum(b.row.length for b in blocks) == made.objects[0].index_offset


@pytest.mark.parametrize("answers", [1, 2])
def test_damage_on_the_way_is_read_again(answers: int) -> None:
    made = version(ranks=1)
    whole = {b.row: bytes(b.payload) for b in read_blocks(made.store, made.objects, SCHEMA)}
    made.store.asked.clear()
    if answers == 1:  # the index
        made.store.damage_next = 1
        found = {b.row: bytes(b.payload) for b in read_blocks(made.store, made.objects, SCHEMA)}
    else:  # the blocks
        blocks = read_blocks(made.store, made.objects, SCHEMA, wanted=_damaging(made.store))
        found = {b.row: bytes(b.payload) for b in blocks}
    assert found == whole
    assert len(made.store.asked) == 3


def _damaging(store: CountingStore):
    def wanted(index):
        store.damage_next = 1
        return np.ones(len(index), np.bool_)

    return wanted


def test_damage_in_the_store_names_the_key_the_block_and_the_field() -> None:
    made = version(ranks=1)
    item = made.objects[0]
    first = next(iter(read_blocks(made.store, made.objects, SCHEMA))).row
    data = bytearray(made.store.get(item.key))
    data[first.length // 2] ^= 1
    made.store.put(item.key, bytes(data))
    with pytest.raises(CorruptError, match=r"deltas/r0: tensor 'down', tile 0, \[0, .*blake3"):
        list(read_blocks(made.store, made.objects, SCHEMA))


def test_a_damaged_index_in_the_store_is_corrupt() -> None:
    made = version(ranks=1)
    item = made.objects[0]
    data = bytearray(made.store.get(item.key))
    data[item.index_offset + 9] ^= 1
    made.store.put(item.key, bytes(data))
    with pytest.raises(CorruptError, match=r"deltas/r0: index: .*SHA-256"):
        list(read_blocks(made.store, made.objects, SCHEMA))


def test_nothing_is_staged_from_a_damaged_version(tmp_path: Path) -> None:
    made = version(ranks=1)
    data = bytearray(made.store.get("deltas/r0"))
    data[200] ^= 1
    made.store.put("deltas/r0", bytes(data))
    with pytest.raises(CorruptError):
        stage(made.store, made.edge, SCHEMA, tmp_path / "staged")
    assert not (tmp_path / "staged").exists()


def test_an_object_that_was_collected_is_missing() -> None:
    made = version()
    made.store.delete(["deltas/r1"])
    with pytest.raises(MissingError):
        list(read_blocks(made.store, made.objects, SCHEMA))
