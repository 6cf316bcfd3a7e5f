"""Random words of a small schema, their changes as staged blocks, and what ranks hold of them."""

import numpy as np

from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors import changes, digest
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words, word_type

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
                    by = changes.diff_words(before[lo:hi], after[lo:hi], ordered=spec.is_ordered)
                    block = block._replace(codec=Codec.L1, index=by.index, data=by.delta)
                found.append(block)
    return found


def state(schema: Schema, words: Weights) -> Digest:
    total = digest.ZERO
    for spec, offset in zip(schema.tensors, schema.offsets, strict=False):
        total = total.plus(digest.scan(words[spec.name], offset))
    return total


def equal(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def whole(schema: Schema, words: Weights) -> tuple[LiveWeights, Weights]:
    memory = {name: part.copy() for name, part in words.items()}
    return LiveWeights(schema, memory, identity_regions(schema)), memory


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


def some_block(**changed: object) -> StagedBlock:
    at = np.array([1, 5], np.uint32)
    block = StagedBlock(0, 0, 0, 70, Codec.L1, at, np.array([1, 2], np.uint32))
    return block._replace(**changed)  # type: ignore[arg-type]
