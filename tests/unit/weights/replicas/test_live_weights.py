"""Live words: changed exactly, restored exactly, counted once; bad blocks refused untouched."""

import numpy as np
import pytest
from tests.support.weights.live_words import (
    PLAIN,
    blocks,
    changed_words,
    equal,
    random_words,
    schema_of,
    sliced,
    some_block,
    state,
    whole,
)

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs.ids import WHOLE_TENSOR, Codec
from etude.common.weights.replicas.live_weights import LiveWeights, slice_regions
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors import ulp
from etude.common.weights.tensors.tiles import tiling


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
        assert live.write(prepared)
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
    assert live.write(prepared)
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
    assert not live.write(prepared)
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
    assert live.write(prepared)
    assert equal(memory, new)


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
    assert live.write(prepared)
    assert equal(memory, new)


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


def test_differences_move_words_where_the_axis_wraps() -> None:
    old = np.array([0x7FFF, 0xFFFF], np.uint16)
    new = ulp.add_ulps(old, np.array([1, 0xFFFF], np.uint16), ordered=True)
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
