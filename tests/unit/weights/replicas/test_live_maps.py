"""Maps of live words: slices, fused, padded, copied and transposed parameters; bad maps refused."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.weights.live_words import (
    PLAIN,
    Weights,
    blocks,
    changed_words,
    equal,
    random_words,
    schema_of,
    sliced,
    state,
)

from etude.common.weights.replicas.live_weights import LiveWeights, Region, slice_regions
from etude.common.weights.tensors import digest


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_all_ranks_add_up_to_the_whole(ranks: int) -> None:
    old = random_words(PLAIN, 1)
    new = changed_words(PLAIN, old, 5, 0.02)
    changed = blocks(PLAIN, old, new)
    before = after = digest.ZERO
    for rank in range(ranks):
        memory = sliced(PLAIN, old, rank, ranks)
        live = LiveWeights(PLAIN, memory, slice_regions(PLAIN, rank, ranks))
        before = before.plus(live.scan())
        prepared = live.prepare(changed)
        after = after.plus(prepared.digest)
        assert live.write(prepared)
        assert equal(memory, sliced(PLAIN, new, rank, ranks))
        assert live.undo(prepared)
        assert equal(memory, sliced(PLAIN, old, rank, ranks))
    assert before == state(PLAIN, old)
    assert before.plus(after) == state(PLAIN, new)


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
    assert live.write(prepared)
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
    assert live.write(prepared)
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
    assert live.write(live.prepare(blocks(schema, old, new)))
    assert np.array_equal(memory["transposed"].reshape(50, 100).T.ravel(), new["matrix"])


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
