"""Live words: found through any map, changed exactly, restored exactly, counted once."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.weights import changes, digest, staged, ulp
from etude.common.weights.codecs.ids import WHOLE_TENSOR, Codec
from etude.common.weights.digest import Digest
from etude.common.weights.live import LiveWeights, Region, identity_regions, slice_regions
from etude.common.weights.schema import Schema, TensorSpec
from etude.common.weights.staged import StagedBlock
from etude.common.weights.tiles import tiling
from etude.common.weights.words import Words, word_type

Weights = dict[str, Words]


def schema_of(*specs: tuple[str, str, tuple[int, ...], str], grid: int = 4) -> Schema:
    tensors = [
        TensorSpec(name=name, dtype=dtype, shape=shape, split=split)  # type: ignore[arg-type]
        for name, dtype, shape, split in sorted(specs)
    ]
    return Schema(grid=grid, tensors=tuple(tensors))  # type: ignore[arg-type]


PLAIN = schema_of(
    ("bias", "F32", (77,), "rows"),
    ("codes", "F8_E4M3", (33, 40), "rows"),
    ("down", "BF16", (96, 8192), "columns"),
    ("embed", "BF16", (1000, 600), "rows"),
    ("experts", "BF16", (3, 512, 640), "rows"),
    ("experts_down", "BF16", (2, 64, 8192), "columns"),
    ("index", "I64", (50,), "rows"),
    ("nothing", "BF16", (0, 4), "rows"),
    ("scales", "U8", (5,), "rows"),
)


def random_words(schema: Schema, seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        s.name: rng.integers(0, 256, s.num_bytes, np.uint8).view(word_type(s.dtype))
        for s in schema.tensors
    }


def changed_words(schema: Schema, old: Weights, seed: int, density: float) -> Weights:
    rng = np.random.default_rng(seed)
    new = random_words(schema, seed + 1)
    return {n: np.where(rng.random(old[n].size) < density, new[n], old[n]) for n in old}


def tile_words(schema: Schema, tensor: int, tile: int, words: Words) -> Words:
    """A tile cut out by numpy's own slices."""
    cut = tiling(schema.tensors[tensor], schema.grid)
    at = cut.tile(tile)
    plane = words.reshape(cut.planes, cut.rows, cut.columns)[at.plane]
    part: Words = plane[at.row : at.row + at.rows, at.column : at.column + at.columns]
    return part.ravel()


def blocks(schema: Schema, old: Weights, new: Weights, *, dense: bool = False) -> list[StagedBlock]:
    """All tiles that differ, the even ones cut in two."""
    found = []
    for number, spec in enumerate(schema.tensors):
        for tile in range(tiling(spec, schema.grid).tiles if spec.elements else 0):
            before, after = (tile_words(schema, number, tile, w[spec.name]) for w in (old, new))
            middle = before.size // 3 if tile % 2 == 0 else 0
            for lo, hi in ((0, middle), (middle, before.size)):
                if lo == hi or (before[lo:hi] == after[lo:hi]).all():
                    continue
                block = StagedBlock(number, tile, lo, hi, Codec.DENSE, None, after[lo:hi])
                if not dense:
                    by = changes.between(before[lo:hi], after[lo:hi], ordered=spec.is_ordered)
                    block = block._replace(codec=Codec.L1, index=by.index, data=by.delta)
                found.append(block)
    return found


def state(schema: Schema, words: Weights) -> Digest:
    total = digest.NOTHING
    for spec, offset in zip(schema.tensors, schema.offsets, strict=False):
        total = total.plus(digest.scan(words[spec.name], offset))
    return total


def equal(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def whole(schema: Schema, words: Weights) -> tuple[LiveWeights, Weights]:
    memory = {name: part.copy() for name, part in words.items()}
    return LiveWeights(schema, memory, identity_regions(schema)), memory


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("dense", [False, True])
def test_a_commit_gives_the_new_words_and_an_undo_the_old(*, dense: bool, density: float) -> None:
    old = random_words(PLAIN, 1)
    new = changed_words(PLAIN, old, 5, density)
    live, memory = whole(PLAIN, old)
    assert live.scan() == state(PLAIN, old)
    prepared = live.prepare(blocks(PLAIN, old, new, dense=dense))
    assert equal(memory, old)
    assert live.scan().plus(prepared.digest) == state(PLAIN, new)
    assert prepared.changed == sum(int((old[n] != new[n]).sum()) for n in old)
    for _ in range(2):
        assert live.commit(prepared)
        assert equal(memory, new)
        assert live.scan() == state(PLAIN, new)
    for _ in range(2):
        assert live.undo(prepared)
        assert equal(memory, old)


def test_the_order_of_blocks_does_not_matter_and_memory_is_what_changed() -> None:
    old = random_words(PLAIN, 2)
    new = changed_words(PLAIN, old, 3, 0.01)
    live, memory = whole(PLAIN, old)
    prepared = live.prepare(reversed(blocks(PLAIN, old, new)))
    width = {s.name: s.num_bytes // s.elements for s in PLAIN.tensors if s.elements}
    expected = sum(int((old[n] != new[n]).sum()) * (4 + 2 * w) for n, w in width.items())
    assert prepared.num_bytes == expected
    assert live.commit(prepared)
    assert equal(memory, new)


def test_a_dense_block_holds_no_more_than_old_and_new_words() -> None:
    old, new = random_words(PLAIN, 2), random_words(PLAIN, 9)
    live, _ = whole(PLAIN, old)
    prepared = live.prepare(blocks(PLAIN, old, new, dense=True))
    assert prepared.num_bytes <= 2 * PLAIN.num_bytes


def test_a_word_that_was_neither_old_nor_new_is_told_and_undone() -> None:
    old = random_words(PLAIN, 1)
    new = changed_words(PLAIN, old, 5, 0.01)
    live, memory = whole(PLAIN, old)
    prepared = live.prepare(blocks(PLAIN, old, new))
    place = int(np.flatnonzero(old["embed"] != new["embed"])[7])
    memory["embed"][place] = 3 + max(old["embed"][place], new["embed"][place]) % 1000
    assert not live.commit(prepared)
    assert live.undo(prepared)
    assert equal(memory, old)


def test_half_a_commit_is_completed_or_undone() -> None:
    old = random_words(PLAIN, 1)
    new = changed_words(PLAIN, old, 5, 0.01)
    live, memory = whole(PLAIN, old)
    prepared = live.prepare(blocks(PLAIN, old, new))
    for name in ("bias", "down"):
        memory[name][:] = new[name]
    memory["embed"][:300_000] = new["embed"][:300_000]
    assert live.undo(prepared)
    assert equal(memory, old)
    memory["embed"][:300_000] = new["embed"][:300_000]
    assert live.commit(prepared)
    assert equal(memory, new)


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_all_ranks_add_up_to_the_whole(ranks: int) -> None:
    old = random_words(PLAIN, 1)
    new = changed_words(PLAIN, old, 5, 0.02)
    changed = blocks(PLAIN, old, new)
    before = after = digest.NOTHING
    for rank in range(ranks):
        memory = sliced(PLAIN, old, rank, ranks)
        live = LiveWeights(PLAIN, memory, slice_regions(PLAIN, rank, ranks))
        before = before.plus(live.scan())
        prepared = live.prepare(changed)
        after = after.plus(prepared.digest)
        assert live.commit(prepared)
        assert equal(memory, sliced(PLAIN, new, rank, ranks))
        assert live.undo(prepared)
        assert equal(memory, sliced(PLAIN, old, rank, ranks))
    assert before == state(PLAIN, old)
    assert before.plus(after) == state(PLAIN, new)


def sliced(schema: Schema, words: Weights, rank: int, ranks: int) -> Weights:
    """What a tensor-parallel rank holds, cut by numpy."""
    found = {}
    for spec in schema.tensors:
        part = words[spec.name].reshape(spec.shape)
        axis = {"rows": -2, "columns": -1}[spec.split]
        if part.ndim > 1 and part.shape[axis] % ranks == 0 and part.size:
            part = np.split(part, ranks, axis=axis)[rank]
        found[spec.name] = part.ravel().copy()
    return found


FUSED = schema_of(
    ("embed", "BF16", (500, 256), "rows"),
    ("gate", "BF16", (384, 256), "rows"),
    ("k", "BF16", (64, 256), "rows"),
    ("o", "BF16", (256, 1024), "columns"),
    ("q", "BF16", (256, 256), "rows"),
    ("up", "BF16", (384, 256), "rows"),
    ("v", "BF16", (64, 256), "rows"),
)


def rows(parameter: str, at: int, height: int, width: int = 256) -> Region:
    return Region(parameter, at * width, 0, height, width, width, width)


def fused_regions() -> dict[int, Sequence[Region]]:
    at = FUSED.index
    return {
        at["q"]: [rows("qkv", 0, 256)],
        at["k"]: [rows("qkv", 256, 64)],
        at["v"]: [rows("qkv", 320, 64)],
        at["gate"]: [rows("gate_up", 0, 384)],
        at["up"]: [rows("gate_up", 384, 384)],
        # Padded vocabulary, and the head is a copy of it with wider rows.
        at["embed"]: [rows("embed", 0, 500), Region("head", 16, 0, 500, 256, 300, 256)],
        # Two panels of columns, stored one behind the other.
        at["o"]: [
            Region("o", 0, 0, 256, 512, 512, 1024),
            Region("o", 256 * 512, 512, 256, 512, 512, 1024),
        ],
    }


def fused_memory(words: Weights) -> Weights:
    o = words["o"].reshape(256, 1024)
    head = np.full((513, 300), 7, np.uint16)
    head.reshape(-1)[16 : 16 + 500 * 300].reshape(500, 300)[:, :256] = words["embed"].reshape(
        500, 256
    )
    return {
        "qkv": np.concatenate([words["q"], words["k"], words["v"]]),
        "gate_up": np.concatenate([words["gate"], words["up"]]),
        "embed": np.concatenate([words["embed"], np.full(12 * 256, 9, np.uint16)]),
        "head": head.ravel(),
        "o": np.concatenate([o[:, :512].ravel(), o[:, 512:].ravel()]),
    }


@settings(max_examples=15, deadline=None)  # compiling takes seconds once, then the case is quick
@given(seed=st.integers(0, 1000), density=st.sampled_from([0.0001, 0.01, 0.9]), dense=st.booleans())
def test_fused_padded_and_replicated_parameters_are_changed_and_counted_once(
    *, seed: int, density: float, dense: bool
) -> None:
    old = random_words(FUSED, seed)
    new = changed_words(FUSED, old, seed + 10, density)
    memory = fused_memory(old)
    live = LiveWeights(FUSED, memory, fused_regions())
    assert live.scan() == state(FUSED, old)
    prepared = live.prepare(blocks(FUSED, old, new, dense=dense))
    assert live.scan().plus(prepared.digest) == state(FUSED, new)
    assert live.commit(prepared)
    assert equal(memory, fused_memory(new))
    assert live.scan() == state(FUSED, new)
    assert live.undo(prepared)
    assert equal(memory, fused_memory(old))


def test_a_slice_and_the_whole_of_one_tensor_count_each_element_once() -> None:
    schema = schema_of(("embed", "BF16", (64, 48), "rows"))
    old = random_words(schema, 4)
    new = changed_words(schema, old, 5, 0.3)
    regions = {0: [Region("part", 0, 16 * 48, 16, 48, 48, 48), Region("all", 0, 0, 64, 48, 48, 48)]}
    memory = {"part": old["embed"][16 * 48 : 32 * 48].copy(), "all": old["embed"].copy()}
    live = LiveWeights(schema, memory, regions)
    assert live.scan() == state(schema, old)
    prepared = live.prepare(blocks(schema, old, new))
    assert prepared.changed == int((old["embed"] != new["embed"]).sum())
    assert live.commit(prepared)
    assert live.scan() == state(schema, new)
    assert np.array_equal(memory["part"], new["embed"][16 * 48 : 32 * 48])


def test_one_row_of_a_tensor_may_be_a_region_of_single_words() -> None:
    schema = schema_of(("matrix", "BF16", (100, 50), "rows"))
    old = random_words(schema, 4)
    new = changed_words(schema, old, 5, 0.5)
    memory = {"transposed": np.ascontiguousarray(old["matrix"].reshape(100, 50).T).ravel()}
    columns = [Region("transposed", 100 * c, c, 100, 1, 1, 50) for c in range(50)]
    live = LiveWeights(schema, memory, {0: columns})
    assert live.scan() == state(schema, old)
    assert live.commit(live.prepare(blocks(schema, old, new)))
    assert np.array_equal(memory["transposed"].reshape(50, 100).T.ravel(), new["matrix"])


def test_the_baseline_is_the_exclusive_or_of_a_whole_tensor() -> None:
    schema = schema_of(("down", "BF16", (96, 8192), "columns"))
    old = random_words(schema, 4)
    new = changed_words(schema, old, 5, 0.01)
    at = np.flatnonzero(old["down"] != new["down"])
    block = StagedBlock(
        *(0, WHOLE_TENSOR, 0, old["down"].size),
        codec=Codec.XOR_ZSTD,
        index=at.astype(np.uint32),
        data=old["down"][at] ^ new["down"][at],
    )
    live, memory = whole(schema, old)
    prepared = live.prepare([block])
    assert live.scan().plus(prepared.digest) == state(schema, new)
    assert live.commit(prepared)
    assert equal(memory, new)


def some_block(**changed: object) -> StagedBlock:
    at = np.array([1, 5], np.uint32)
    block = StagedBlock(0, 0, 0, 70, Codec.L1, at, np.array([1, 2], np.uint32))
    return block._replace(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "what"),
    [
        (some_block(tensor=99), "tensor 99"),
        (some_block(tile=1), "no range"),
        (some_block(hi=78), "no range"),
        (some_block(lo=70), "no range"),
        (some_block(lo=65), "do not increase"),
        (some_block(index=np.array([5, 5], np.uint32)), "do not increase"),
        (some_block(index=np.array([5, 70], np.uint32)), "do not increase"),
        (some_block(index=np.array([5], np.uint32)), "2 words for 1"),
        (some_block(index=None), "2 words for 70"),
        (some_block(data=np.array([1, 2], np.uint16)), "uint16"),
    ],
)
def test_blocks_that_the_schema_cannot_have_are_refused(block: StagedBlock, what: str) -> None:
    live, memory = whole(PLAIN, random_words(PLAIN, 1))
    before = {name: part.copy() for name, part in memory.items()}
    with pytest.raises(CorruptError, match=what):
        live.prepare([block])
    assert equal(memory, before)


def test_two_blocks_of_one_element_are_refused() -> None:
    live, _ = whole(PLAIN, random_words(PLAIN, 1))
    with pytest.raises(CorruptError, match="two blocks hold element 60"):
        live.prepare([some_block(), some_block(lo=60)])


@pytest.mark.parametrize(
    ("region", "what"),
    [
        (Region("other", 0, 0, 1, 77, 77, 77), "no parameter 'other'"),
        (Region("bias", 0, 0, 1, 78, 78, 78), "element 78 of 77"),
        (Region("bias", 1, 0, 1, 77, 77, 77), "word 78 of 77"),
        (Region("bias", 0, 0, 7, 11, 10, 11), "overlap"),
        (Region("bias", -1, 0, 1, 7, 7, 7), "no negative"),
        (Region("bias", 0, 0, 0, 7, 7, 7), "has elements"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(region: Region, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        LiveWeights(PLAIN, random_words(PLAIN, 1), {PLAIN.index["bias"]: [region]})


def test_memory_of_another_type_or_without_leave_to_write_is_refused() -> None:
    locked = np.zeros(77, np.uint32)
    locked.flags.writeable = False
    for words in (np.zeros(77, np.uint16), locked, np.zeros(154, np.uint32)[::2]):
        with pytest.raises(ValueError, match="bias"):
            LiveWeights(PLAIN, {"bias": words}, {0: [Region("bias", 0, 0, 1, 77, 77, 77)]})


def test_staged_blocks_survive_their_file(tmp_path: Path) -> None:
    old = random_words(PLAIN, 1)
    new = changed_words(PLAIN, old, 5, 0.02)
    path = tmp_path / "staged"
    undecoded = StagedBlock(3, 0, 0, 9, Codec.L2, None, None, b"abcde", flags=0, changed=4)
    expected = [*blocks(PLAIN, old, new), *blocks(PLAIN, old, new, dense=True)[:5], undecoded]
    staged.write(path, iter(expected))
    assert not list(tmp_path.glob("*.part"))
    found = staged.read(path)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[:5] == other[:5]
        assert (one.index is None) == (other.index is None)
        assert (one.data is None) == (other.data is None)
        if one.index is not None and other.index is not None:
            assert np.array_equal(one.index, other.index)
        if one.data is not None and other.data is not None:
            assert np.array_equal(one.data, other.data)
            assert one.data.dtype == other.data.dtype
    assert bytes(found[-1].payload or b"") == b"abcde"
    assert found[-1].num_changed == 4


def test_a_version_comes_through_a_staged_file(tmp_path: Path) -> None:
    old = random_words(PLAIN, 1)
    new = changed_words(PLAIN, old, 5, 0.02)
    staged.write(tmp_path / "staged", blocks(PLAIN, old, new))
    live, memory = whole(PLAIN, old)
    assert live.commit(live.prepare(staged.read(tmp_path / "staged")))
    assert equal(memory, new)


def test_a_cut_off_staged_file_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    staged.write(path, [some_block(), some_block(lo=1)])
    whole_file = path.read_bytes()
    for size in range(len(whole_file)):
        path.write_bytes(whole_file[:size])
        with pytest.raises(CorruptError):
            staged.read(path)


def test_an_empty_version_is_staged_and_committed(tmp_path: Path) -> None:
    staged.write(tmp_path / "staged", [])
    live, _ = whole(PLAIN, random_words(PLAIN, 1))
    prepared = live.prepare(staged.read(tmp_path / "staged"))
    assert prepared.digest == digest.NOTHING
    assert (prepared.changed, prepared.num_bytes) == (0, 0)
    assert live.commit(prepared)


def test_differences_move_words_where_the_axis_wraps() -> None:
    old = np.array([0x7FFF, 0xFFFF], np.uint16)
    new = ulp.moved(old, np.array([1, 0xFFFF], np.uint16), ordered=True)
    assert new.tolist() == [0xFFFF, 0x7FFF]


def test_a_block_that_only_old_words_decode_must_be_whole_on_the_rank() -> None:
    live = LiveWeights(
        PLAIN, sliced(PLAIN, random_words(PLAIN, 1), 0, 2), slice_regions(PLAIN, 0, 2)
    )
    tensor = PLAIN.index["embed"]
    cut = tiling(PLAIN.tensors[tensor], PLAIN.grid)
    inside = StagedBlock(tensor, 0, 0, cut.tile(0).elements, Codec.L2, None, None, b"\x00", 0, 1)
    with pytest.raises(CorruptError, match="'embed', tile 0"):
        live.prepare([inside])
    outside = inside._replace(tile=cut.tiles - 1)
    assert live.prepare([outside]).changed == 0
    half = slice_regions(PLAIN, 0, 2)
    half[tensor] = [half[tensor][0]._replace(width=1000, rows=1)]
    live = LiveWeights(PLAIN, sliced(PLAIN, random_words(PLAIN, 1), 0, 2), half)
    with pytest.raises(ValueError, match="not whole"):
        live.prepare([inside])
