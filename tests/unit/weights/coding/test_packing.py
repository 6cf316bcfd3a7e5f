"""Packing and reading: what a trainer's ranks pack is what a replica's ranks apply."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.weights.coding.block_index import Index
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.coding.container import Container, parse_index
from etude.common.weights.replicas.block_reader import VerifiedBlock, stage_block
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words, word_type
from etude.trainer.export.delta_packer import PackedContainer, Packer, Shard, shard_words
from etude.trainer.export.tile_grouping import tile_ranges

Weights = dict[str, Words]


def spec(name: str, dtype: str, shape: tuple[int, ...], split: str = "rows") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, split=split)  # type: ignore[arg-type]


SCHEMA = Schema(
    grid=4,
    tensors=(
        spec("bias", "F32", (77,)),
        spec("codes", "F8_E4M3", (33, 40)),
        spec("down", "BF16", (96, 8192), "columns"),
        spec("embed", "BF16", (1000, 600)),
        spec("experts", "BF16", (3, 512, 640)),
        spec("experts_down", "BF16", (2, 64, 8192), "columns"),
        spec("index", "I64", (50,)),
        spec("nothing", "BF16", (0, 4)),
        spec("scales", "U8", (5,)),
    ),
)


def random_words(seed: int) -> Weights:
    """Finite words."""
    rng = np.random.default_rng(seed)
    found: Weights = {}
    for each in SCHEMA.tensors:
        word = word_type(each.dtype)
        if each.dtype == "BF16":
            values = rng.normal(0, 0.02, each.elements).astype(np.float32)
            found[each.name] = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            found[each.name] = rng.integers(0, 120, each.elements).astype(word)
    return found


def stepped(old: Weights, seed: int, density: float) -> Weights:
    """Some words moved by one or a little more."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, words in old.items():
        step = rng.choice([1, 1, 1, 2, 300], words.size).astype(words.dtype)
        found[name] = words + np.where(rng.random(words.size) < density, step, 0).astype(
            words.dtype
        )
    return found


def shards(ranks: int) -> list[dict[int, Shard]]:
    """Equal ranges of every tensor, which cut its tiles anywhere."""
    found: list[dict[int, Shard]] = []
    for rank in range(ranks):
        sizes = [(n, each.elements) for n, each in enumerate(SCHEMA.tensors)]
        found.append(
            {n: Shard(size * rank // ranks, size * (rank + 1) // ranks) for n, size in sizes}
        )
    return found


def packed(
    old: Weights, new: Weights, held: dict[int, Shard], codec: Codec, **options: bool
) -> PackedContainer:
    with Packer(SCHEMA, codec=codec, **options) as packer:
        # Any order of tensors will do.
        for tensor in sorted(held, reverse=True):
            each, shard = SCHEMA.tensors[tensor], held[tensor]
            before, after = (w[each.name][shard.start : shard.stop] for w in (old, new))
            at = np.flatnonzero(before != after)
            cut = tiling(each, SCHEMA.grid)
            packer.add_changes(
                tensor,
                at + shard.start,
                before[at],
                after[at],
                shard,
                block_words=shard_words(after, shard, cut),
            )
        return packer.finish()


def index_of(made: Container) -> Index:
    return parse_index(
        made.data[made.index_offset : made.index_offset + made.index_length],
        schema=SCHEMA,
        size=made.size,
        index_offset=made.index_offset,
        sha256=made.index_sha256,
        where="here",
    )


def staged_blocks(made: Container) -> list[StagedBlock]:
    data = memoryview(made.data)
    return [
        stage_block(
            VerifiedBlock(row, data[row.offset : row.offset + row.length]), SCHEMA, where="here"
        )
        for row in index_of(made)
    ]


def state(words: Weights) -> Digest:
    total = digest.ZERO
    for each, offset in zip(SCHEMA.tensors, SCHEMA.offsets, strict=False):
        total = total.plus(digest.scan(words[each.name], offset))
    return total


def equal(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def applied(old: Weights, parts: list[PackedContainer]) -> Weights:
    memory = {name: words.copy() for name, words in old.items()}
    live = LiveWeights(SCHEMA, memory, identity_regions(SCHEMA))
    prepared = live.prepare([block for part in parts for block in staged_blocks(part.container)])
    assert live.write(prepared)
    expected = digest.ZERO
    for part in parts:
        expected = expected.plus(part.digest)
    assert prepared.digest == expected
    return memory


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("density", [0.0, 0.0002, 0.01, 0.2, 0.5])
def test_what_the_ranks_pack_turns_old_words_into_new_ones(
    codec: Codec, ranks: int, density: float
) -> None:
    old = random_words(1)
    new = stepped(old, 2, density)
    parts = [packed(old, new, held, codec) for held in shards(ranks)]
    assert equal(applied(old, parts), new)
    change = digest.ZERO
    for part in parts:
        change = change.plus(part.digest)
    assert state(old).plus(change) == state(new)
    changed = sum(int((old[name] != new[name]).sum()) for name in old)
    assert sum(part.stats.changed for part in parts) == changed
    assert sum(part.stats.elements for part in parts) == sum(s.elements for s in SCHEMA.tensors)


@settings(max_examples=10, deadline=None)  # compiling takes seconds once, then the case is quick
@given(
    seed=st.integers(0, 10_000),
    density=st.floats(0, 1),
    ranks=st.integers(1, 5),
    compress=st.booleans(),
)
def test_any_density_and_any_cut_survive(
    *, seed: int, density: float, ranks: int, compress: bool
) -> None:
    old = random_words(seed)
    new = stepped(old, seed + 1, density)
    parts = [packed(old, new, held, Codec.L1, compress=compress) for held in shards(ranks)]
    assert equal(applied(old, parts), new)


@pytest.mark.parametrize("ranks", [1, 3])
def test_complete_containers_need_no_old_words(ranks: int) -> None:
    new = random_words(7)
    parts = []
    for held in shards(ranks):
        with Packer(SCHEMA) as packer:
            for tensor, shard in held.items():
                words = new[SCHEMA.tensors[tensor].name]
                packer.add_complete(tensor, words[shard.start : shard.stop], shard)
            parts.append(packer.finish())
    memory = {name: np.zeros_like(words) for name, words in new.items()}
    live = LiveWeights(SCHEMA, memory, identity_regions(SCHEMA))
    blank = live.scan()
    prepared = live.prepare([b for part in parts for b in staged_blocks(part.container)])
    assert live.write(prepared)
    assert equal(memory, new)
    total = digest.ZERO
    for part in parts:
        total = total.plus(part.digest)
        assert set(part.stats.codecs) == {"DENSE"}
    assert total == state(new) == blank.plus(prepared.digest)


@pytest.mark.parametrize("codec", [Codec.L1, Codec.L2, Codec.L2R])
def test_where_much_changed_all_words_of_a_block_are_moved(codec: Codec) -> None:
    old = random_words(1)
    few = packed(old, stepped(old, 2, 0.01), shards(1)[0], codec)
    many = packed(old, stepped(old, 2, 0.4), shards(1)[0], codec)
    assert few.stats.codecs[codec.name] > few.stats.codecs.get("DENSE", 0)
    assert many.stats.codecs["DENSE_DELTA"] > few.stats.codecs.get("DENSE_DELTA", 0)
    assert set(many.stats.codecs) <= {"DENSE_DELTA", "DENSE"}
    assert many.stats.num_bytes < 0.5 * SCHEMA.num_bytes
    assert equal(applied(old, [many]), stepped(old, 2, 0.4))


def test_words_that_moved_far_everywhere_are_sent_themselves() -> None:
    old, new = random_words(1), random_words(2)
    new["embed"][:] = 0x3F80
    found = packed(old, new, shards(1)[0], Codec.L1)
    index = index_of(found.container)
    embed = [each.name for each in SCHEMA.tensors].index("embed")
    assert set(index.codec[index.tensor == embed].tolist()) == {int(Codec.DENSE)}
    assert equal(applied(old, [found]), new)


def test_moves_of_most_words_are_half_of_single_precision_weights() -> None:
    rng = np.random.default_rng(0)
    schema = Schema(grid=1, tensors=(spec("w", "F32", (400, 500)),))
    values = rng.normal(0, 0.02, 200_000).astype(np.float32)
    after = values + rng.normal(0, 1e-5, values.size).astype(np.float32)
    old, new = values.view(np.uint32), after.view(np.uint32)
    flat = np.flatnonzero(old != new)
    with Packer(schema) as packer:
        packer.add_changes(
            *(0, flat, old[flat], new[flat], Shard(0, 200_000)),
            block_words=lambda _, lo, hi: new[lo:hi],
        )
        stats = packer.finish().stats
    assert set(stats.codecs) == {"DENSE_DELTA"}
    assert stats.num_bytes < 0.6 * schema.num_bytes


def test_tiles_without_changes_are_no_blocks() -> None:
    old = random_words(1)
    new = {name: words.copy() for name, words in old.items()}
    new["embed"][300_000] += 1
    found = packed(old, new, shards(1)[0], Codec.L1)
    assert [(row.tensor, row.tile, row.changed) for row in index_of(found.container)] == [(3, 2, 1)]
    nothing = packed(old, old, shards(1)[0], Codec.L1)
    assert len(index_of(nothing.container)) == 0
    assert nothing.digest == digest.ZERO


def test_steps_to_a_neighbour_and_words_without_a_number_are_counted() -> None:
    schema = Schema(grid=1, tensors=(spec("w", "BF16", (6,)),))
    old = np.array([0x3F80, 0x3F80, 0x0000, 0x3F80, 0x3F80, 0xFF7F], np.uint16)
    new = np.array([0x3F81, 0x3F7F, 0x8000, 0x7FC0, 0x3F90, 0xFF80], np.uint16)
    with Packer(schema) as packer:
        packer.add_changes(
            0, np.arange(6), old, new, Shard(0, 6), block_words=lambda _, lo, hi: new[lo:hi]
        )
        stats = packer.finish().stats
    assert (stats.changed, stats.one_ulp, stats.nonfinite) == (6, 4, 2)


def test_l2_takes_whole_tiles_and_leaves_cut_ones_and_wide_words_to_l1() -> None:
    old = random_words(1)
    new = stepped(old, 2, 0.01)
    whole = packed(old, new, shards(1)[0], Codec.L2)
    index = index_of(whole.container)
    wide = [n for n, each in enumerate(SCHEMA.tensors) if each.dtype == "I64"]
    assert set(index.codec[~np.isin(index.tensor, wide)].tolist()) == {int(Codec.L2)}
    cut = packed(old, new, shards(3)[1], Codec.L2)
    assert cut.stats.codecs["L1"] > 0
    assert cut.stats.codecs["L2"] > 0


def test_pieces_of_all_shards_cover_every_tile_once() -> None:
    for tensor, each in enumerate(SCHEMA.tensors):
        if not each.elements:
            continue
        cut = tiling(each, SCHEMA.grid)
        covered = dict.fromkeys(range(cut.tiles), 0)
        for held in shards(5):
            for piece in tile_ranges(held[tensor], cut):
                assert piece.lo == covered[piece.tile]
                covered[piece.tile] = piece.hi
        assert covered == {tile: cut.tile(tile).elements for tile in range(cut.tiles)}


def one(**changed: object) -> dict[str, object]:
    at = np.array([3, 5])
    words = np.array([1, 2], np.uint32)
    fields = {"tensor": 0, "flat": at, "old": words, "new": words + 1, "shard": Shard(0, 70)}
    return {**fields, **changed}


@pytest.mark.parametrize(
    "fields",
    [
        one(flat=np.array([5, 3])),
        one(flat=np.array([3, 3])),
        one(flat=np.array([3, 70])),
        one(flat=np.array([3])),
        one(shard=Shard(4, 70)),
        one(shard=Shard(0, 78)),
        one(shard=Shard(9, 8)),
        one(new=np.array([1, 3], np.uint32)),
        one(new=np.array([7, 9], np.uint16)),
    ],
)
def test_changes_that_are_none_are_refused(fields: dict[str, object]) -> None:
    with Packer(SCHEMA) as packer, pytest.raises(ValueError, match="'bias'"):
        packer.add_changes(**fields, block_words=lambda *_: np.zeros(0, np.uint32))  # type: ignore[arg-type]


def test_a_container_is_of_changes_or_complete() -> None:
    words = np.zeros(5, np.uint8)
    with Packer(SCHEMA) as packer:
        packer.add_complete(8, words, Shard(0, 5))
        packer.add_changes(**one(), block_words=lambda *_: words)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not both"):
            packer.finish()


def test_a_damaged_payload_is_corrupt_or_stays_inside_its_block() -> None:
    old = random_words(1)
    new = stepped(old, 2, 0.01)
    rng = np.random.default_rng(5)
    for codec in Codec:
        made = packed(old, new, {3: Shard(0, 600_000)}, codec).container
        live = LiveWeights(SCHEMA, {n: w.copy() for n, w in old.items()}, identity_regions(SCHEMA))
        for row in index_of(made):
            for _ in range(25):
                data = bytearray(made.data[row.offset : row.offset + row.length])
                data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
                try:
                    live.prepare(
                        [stage_block(VerifiedBlock(row, memoryview(data)), SCHEMA, where="here")]
                    )
                except CorruptError:
                    continue
        assert live.scan() == state(old)
