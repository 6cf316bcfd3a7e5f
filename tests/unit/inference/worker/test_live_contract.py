"""Live words in host memory and on a device keep one contract, word for word.

The device is the CPU, where kernels take their reference path, or ETUDE_TEST_DEVICE.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import l2
from etude.common.weights.coding.codecs.ids import WHOLE_TENSOR, Codec
from etude.common.weights.replicas import live_weights
from etude.common.weights.replicas.live_weights import LiveWeights, Region
from etude.common.weights.replicas.regions import Regions
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.changes import diff_words
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words, word_type
from etude.inference.worker.device.live_weights import DeviceLiveWeights

DEVICE = torch.device(os.environ.get("ETUDE_TEST_DEVICE", "cpu"))

Weights = dict[str, Words]


class Live(Protocol):
    """What both promise; each takes back what it prepared itself."""

    @property
    def regions(self) -> Regions: ...
    def scan(self) -> Digest: ...
    def count(self, regions: Regions) -> None: ...
    def prepare(self, blocks: Iterable[StagedBlock]) -> Any: ...
    def write(self, prepared: Any) -> bool: ...
    def undo(self, prepared: Any) -> bool: ...


class OnHost:
    """Words in numpy's memory."""

    def __init__(self, schema: Schema, words: Weights, regions: Regions) -> None:
        self.memory = {name: part.copy() for name, part in words.items()}
        self.live: Live = LiveWeights(schema, self.memory, regions)

    def read(self) -> Weights:
        return {name: part.copy() for name, part in self.memory.items()}

    def write(self, name: str, start: int, words: Words) -> None:
        self.memory[name][start : start + words.size] = words


class OnDevice:
    """Words in torch's memory."""

    def __init__(self, schema: Schema, words: Weights, regions: Regions) -> None:
        self.words = {name: part.dtype for name, part in words.items()}
        self.memory = {name: self._tensor(part) for name, part in words.items()}
        self.live: Live = DeviceLiveWeights(schema, self.memory, regions)

    @staticmethod
    def _tensor(words: Words) -> torch.Tensor:
        signed = words.copy().view(f"i{words.itemsize}")
        return torch.from_numpy(signed).to(DEVICE)

    def read(self) -> Weights:
        return {n: t.cpu().numpy().copy().view(self.words[n]) for n, t in self.memory.items()}

    def write(self, name: str, start: int, words: Words) -> None:
        self.memory[name][start : start + words.size] = self._tensor(words)


Place = OnHost | OnDevice
Make = Callable[[Schema, Weights, Regions], Place]


@pytest.fixture(params=[OnHost, OnDevice])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


def spec(name: str, dtype: str, shape: tuple[int, ...], split: str = "rows") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, split=split)  # type: ignore[arg-type]


MIXED = Schema(
    grid=4,
    tensors=(
        spec("bias", "F32", (77,)),
        spec("codes", "F8_E4M3", (33, 40)),
        spec("double", "F64", (8, 9)),
        spec("down", "BF16", (40, 4096), "columns"),
        spec("embed", "BF16", (100, 300)),
        spec("experts", "F16", (2, 96, 320)),
        spec("index", "I64", (50,)),
        spec("narrow", "I16", (12, 16)),
        spec("nothing", "BF16", (0, 4)),
        spec("scales", "U8", (5,)),
        spec("wide", "BF16", (270_000,)),
    ),
)


def drawn(schema: Schema, seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        s.name: rng.integers(0, 256, s.num_bytes, np.uint8).view(word_type(s.dtype))
        for s in schema.tensors
    }


def stepped(old: Weights, seed: int, density: float) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        name: words + (rng.random(words.size) < density).astype(words.dtype)
        for name, words in old.items()
    }


def cut(schema: Schema, tensor: int, tile: int, words: Words) -> Words:
    """A tile's words by numpy's own slices."""
    how = tiling(schema.tensors[tensor], schema.grid)
    at = how.tile(tile)
    plane = words.reshape(how.planes, how.rows, how.columns)[at.plane]
    found: Words = plane[at.row : at.row + at.rows, at.column : at.column + at.columns].ravel()
    return found


def blocks(
    schema: Schema, old: Weights, new: Weights, codec: Codec = Codec.L1
) -> list[StagedBlock]:
    """All tiles that differ; those of differences and of whole words cut in two."""
    found = []
    for number, tensor in enumerate(schema.tensors):
        for tile in range(tiling(tensor, schema.grid).tiles if tensor.elements else 0):
            before, after = (cut(schema, number, tile, w[tensor.name]) for w in (old, new))
            by = diff_words(before, after, ordered=tensor.is_ordered)
            if not by.index.size:
                continue
            if codec in {Codec.L2, Codec.L2R}:
                what: Literal["rice", "rans"] = "rans" if codec is Codec.L2R else "rice"
                made = l2.encode(before, by, dtype=tensor.dtype, what=what)
                where = (number, tile, 0, before.size, codec, None, None)
                found.append(StagedBlock(*where, made.payload, made.flags, by.index.size))
                continue
            middle = before.size // 3
            for lo, hi in ((0, middle), (middle, before.size)):
                if lo == hi or (before[lo:hi] == after[lo:hi]).all():
                    continue
                part = diff_words(before[lo:hi], after[lo:hi], ordered=tensor.is_ordered)
                data = (None, after[lo:hi]) if codec is Codec.DENSE else (part.index, part.delta)
                found.append(StagedBlock(number, tile, lo, hi, codec, *data))
    return found


def state(schema: Schema, words: Mapping[str, Words]) -> Digest:
    total = digest.ZERO
    for tensor, offset in zip(schema.tensors, schema.offsets, strict=False):
        total = total.plus(digest.scan(words[tensor.name], offset))
    return total


def equal(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def sliced(schema: Schema, words: Weights, rank: int, ranks: int) -> Weights:
    """What a tensor-parallel rank holds, cut by numpy."""
    found = {}
    for tensor in schema.tensors:
        part = words[tensor.name].reshape(tensor.shape)
        axis = {"rows": -2, "columns": -1}[tensor.split]
        if part.ndim > 1 and part.shape[axis] % ranks == 0 and part.size:
            part = np.split(part, ranks, axis=axis)[rank]
        found[tensor.name] = part.ravel().copy()
    return found


@pytest.mark.parametrize("density", [0.001, 0.3, 1.0])
@pytest.mark.parametrize("codec", [Codec.L1, Codec.DENSE])
def test_a_commit_gives_the_new_words_of_every_format_and_an_undo_the_old(
    make: Make, codec: Codec, density: float
) -> None:
    old = drawn(MIXED, 1)
    new = stepped(old, 5, density)
    place = make(MIXED, old, live_weights.identity_regions(MIXED))
    assert place.live.scan() == state(MIXED, old)
    prepared = place.live.prepare(blocks(MIXED, old, new, codec))
    assert equal(place.read(), old)
    assert state(MIXED, old).plus(prepared.digest) == state(MIXED, new)
    assert prepared.changed == sum(int((old[n] != new[n]).sum()) for n in old)
    for _ in range(2):
        assert place.live.write(prepared)
        assert equal(place.read(), new)
    assert place.live.scan() == state(MIXED, new)
    for _ in range(2):
        assert place.live.undo(prepared)
        assert equal(place.read(), old)


@pytest.mark.parametrize("codec", [Codec.L2, Codec.L2R])
def test_blocks_that_only_old_words_decode_are_decoded_from_the_live_ones(
    make: Make, codec: Codec
) -> None:
    schema = Schema(grid=2, tensors=tuple(t for t in MIXED.tensors if t.dtype == "BF16"))
    rng = np.random.default_rng(4)
    old = {
        t.name: (rng.standard_normal(t.elements, np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
        for t in schema.tensors
    }
    new = stepped(old, 5, 0.02)
    place = make(schema, old, live_weights.identity_regions(schema))
    prepared = place.live.prepare(blocks(schema, old, new, codec))
    assert state(schema, old).plus(prepared.digest) == state(schema, new)
    assert place.live.write(prepared)
    assert equal(place.read(), new)


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_all_ranks_add_up_to_the_whole(make: Make, ranks: int) -> None:
    old = drawn(MIXED, 1)
    new = stepped(old, 5, 0.02)
    changed = blocks(MIXED, old, new)
    before = after = digest.ZERO
    for rank in range(ranks):
        share = live_weights.slice_regions(MIXED, rank, ranks)
        place = make(MIXED, sliced(MIXED, old, rank, ranks), share)
        before = before.plus(place.live.scan())
        prepared = place.live.prepare(changed)
        after = after.plus(prepared.digest)
        assert place.live.write(prepared)
        assert equal(place.read(), sliced(MIXED, new, rank, ranks))
        assert place.live.undo(prepared)
        assert equal(place.read(), sliced(MIXED, old, rank, ranks))
    assert before == state(MIXED, old)
    assert before.plus(after) == state(MIXED, new)


def test_a_region_whose_rows_are_wider_than_a_kernels_tile_is_changed(make: Make) -> None:
    schema = Schema(grid=1, tensors=(spec("experts", "U8", (2, 600, 1000)),))
    old = drawn(schema, 1)
    new = stepped(old, 5, 0.01)
    place = make(schema, sliced(schema, old, 1, 2), live_weights.slice_regions(schema, 1, 2))
    assert place.live.write(place.live.prepare(blocks(schema, old, new)))
    assert equal(place.read(), sliced(schema, new, 1, 2))


def test_half_a_commit_is_completed_or_undone(make: Make) -> None:
    old = drawn(MIXED, 1)
    new = stepped(old, 5, 0.05)
    place = make(MIXED, old, live_weights.identity_regions(MIXED))
    prepared = place.live.prepare(blocks(MIXED, old, new))
    for step, expected in ((place.live.undo, old), (place.live.write, new)):
        place.write("bias", 0, new["bias"])
        place.write("index", 0, new["index"])
        place.write("embed", 0, new["embed"][:20_000])
        assert step(prepared)
        assert equal(place.read(), expected)


@pytest.mark.parametrize("name", ["embed", "double"])
def test_a_word_that_was_neither_old_nor_new_is_told_and_undone(make: Make, name: str) -> None:
    old = drawn(MIXED, 1)
    new = stepped(old, 5, 0.1)
    place = make(MIXED, old, live_weights.identity_regions(MIXED))
    prepared = place.live.prepare(blocks(MIXED, old, new))
    at = int(np.flatnonzero(old[name] != new[name])[3])
    place.write(name, at, old[name][at : at + 1] ^ np.array([64], old[name].dtype))
    assert not place.live.write(prepared)
    assert place.live.undo(prepared)
    assert equal(place.read(), old)


def test_the_baseline_is_the_exclusive_or_of_a_whole_tensor(make: Make) -> None:
    schema = Schema(grid=4, tensors=(spec("down", "BF16", (96, 8192), "columns"),))
    old = drawn(schema, 4)
    new = stepped(old, 5, 0.01)
    at = np.flatnonzero(old["down"] != new["down"])
    block = StagedBlock(
        *(0, WHOLE_TENSOR, 0, old["down"].size, Codec.XOR_ZSTD),
        *(at.astype(np.uint32), old["down"][at] ^ new["down"][at]),
    )
    place = make(schema, old, live_weights.identity_regions(schema))
    prepared = place.live.prepare([block])
    assert place.live.scan().plus(prepared.digest) == state(schema, new)
    assert place.live.write(prepared)
    assert equal(place.read(), new)


FUSED = Schema(
    grid=2,
    tensors=(
        spec("embed", "BF16", (500, 256)),
        spec("k", "BF16", (64, 256)),
        spec("o", "BF16", (256, 1024), "columns"),
        spec("q", "BF16", (256, 256)),
        spec("scale", "F64", (4, 6)),
    ),
)


def fused_regions() -> Regions:
    """Fused rows, a tied copy with wider rows, panels of columns, and a part counted before."""
    return {
        FUSED.index["q"]: [Region("qk", 0, 0, 256, 256, 256, 256)],
        FUSED.index["k"]: [Region("qk", 256 * 256, 0, 64, 256, 256, 256)],
        FUSED.index["embed"]: [
            Region("part", 0, 100 * 256, 50, 256, 256, 256),
            Region("head", 16, 0, 500, 256, 300, 256),
        ],
        FUSED.index["o"]: [
            Region("o", 0, 0, 256, 512, 512, 1024),
            Region("o", 256 * 512, 512, 256, 512, 512, 1024),
        ],
        FUSED.index["scale"]: [
            Region("few", 0, 2, 4, 2, 2, 6),
            Region("scale", 0, 0, 1, 24, 24, 24),
        ],
    }


def fused_memory(words: Weights) -> Weights:
    o = words["o"].reshape(256, 1024)
    embed = words["embed"].reshape(500, 256)
    head = np.full((513, 300), 7, np.uint16)
    head.reshape(-1)[16 : 16 + 500 * 300].reshape(500, 300)[:, :256] = embed
    return {
        "qk": np.concatenate([words["q"], words["k"]]),
        "part": embed[100:150].flatten(),
        "head": head.ravel(),
        "o": np.concatenate([o[:, :512].ravel(), o[:, 512:].ravel()]),
        "few": words["scale"].reshape(4, 6)[:, 2:4].flatten(),
        "scale": words["scale"].copy(),
    }


@settings(max_examples=6, deadline=None)  # compiling takes seconds once
@given(
    seed=st.integers(0, 1000),
    density=st.sampled_from([0.0001, 0.01, 0.9]),
    codec=st.sampled_from([Codec.L1, Codec.DENSE]),
    place_of=st.sampled_from([OnHost, OnDevice]),
)
def test_fused_padded_and_repeated_parameters_are_changed_and_counted_once(
    seed: int, density: float, codec: Codec, place_of: Make
) -> None:
    old = drawn(FUSED, seed)
    new = stepped(old, seed + 10, density)
    place = place_of(FUSED, fused_memory(old), fused_regions())
    assert place.live.scan() == state(FUSED, old)
    prepared = place.live.prepare(reversed(blocks(FUSED, old, new, codec)))
    assert state(FUSED, old).plus(prepared.digest) == state(FUSED, new)
    assert prepared.changed == sum(int((old[n] != new[n]).sum()) for n in old)
    assert place.live.write(prepared)
    assert equal(place.read(), fused_memory(new))
    assert place.live.scan() == state(FUSED, new)
    assert place.live.undo(prepared)
    assert equal(place.read(), fused_memory(old))


def test_regions_that_no_longer_count_are_still_changed(make: Make) -> None:
    old = drawn(FUSED, 1)
    new = stepped(old, 2, 0.1)
    place = make(FUSED, old, live_weights.identity_regions(FUSED))
    place.live.count(
        {t: [r._replace(counted=False) for r in held] for t, held in place.live.regions.items()}
    )
    assert place.live.scan() == digest.ZERO
    prepared = place.live.prepare(blocks(FUSED, old, new))
    assert (prepared.digest, prepared.changed) == (digest.ZERO, 0)
    assert place.live.write(prepared)
    assert equal(place.read(), new)


def test_places_that_do_not_increase_are_refused(make: Make) -> None:
    old = drawn(FUSED, 1)
    place = make(FUSED, old, live_weights.identity_regions(FUSED))
    bad = StagedBlock(
        0, 0, 0, 70, Codec.L1, np.array([5, 5], np.uint32), np.array([1, 1], np.uint16)
    )
    with pytest.raises(CorruptError, match="do not increase"):
        place.live.prepare([bad])


def test_a_map_beyond_the_memory_is_refused(make: Make) -> None:
    region = Region("q", 1, 0, 1, 256 * 256, 256 * 256, 256 * 256)
    with pytest.raises(ValueError, match="word 65537 of 65536"):
        make(FUSED, drawn(FUSED, 1), {FUSED.index["q"]: [region]})
