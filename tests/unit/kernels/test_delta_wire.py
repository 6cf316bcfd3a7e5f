"""The kernels and the wire's own arithmetic agree."""

import numpy as np
import torch

from etude.common.weights.tensors import digest as wire_digest
from etude.common.weights.tensors import ulp
from etude.common.weights.tensors.tiles import TILE_ELEMENTS as WIRE_TILE_ELEMENTS
from etude.common.weights.tensors.words import Words
from etude.kernels import delta as deltas
from etude.kernels.digest import digest_lanes, digest_scan
from etude.kernels.raw_words import Axis
from etude.kernels.tiles import TILE_ELEMENTS, contiguous_tiles


def any_words(rng: np.random.Generator, bits: int) -> Words:
    wide = rng.integers(0, 1 << bits, 5000, dtype=np.uint64)
    return wide.astype({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])


def test_a_digest_is_the_same_on_both_sides() -> None:
    rng = np.random.default_rng(0)
    for bits in (8, 16, 32):
        words = any_words(rng, bits)
        wire = wire_digest.scan(words, 12_345)
        assert digest_lanes(digest_scan(torch.from_numpy(words), first_lane=12_345)) == wire


def test_steps_of_the_wire_resolve_to_the_new_words() -> None:
    rng = np.random.default_rng(1)
    for bits in (8, 16, 32):
        old, new = any_words(rng, bits), any_words(rng, bits)
        tiles = contiguous_tiles([0, 5000], bits=bits, device="cpu")
        for axis in (Axis.PLAIN, Axis.ORDERED):
            staged = deltas.staged_delta(
                tiles,
                counts=torch.tensor([5000], dtype=torch.int32),
                index=torch.arange(5000, dtype=torch.int32),
                value=torch.from_numpy(ulp.delta(old, new, ordered=axis is Axis.ORDERED)),
            )
            resolved = deltas.delta_resolve(torch.from_numpy(old), delta=staged, axis=axis)
            assert np.array_equal(resolved.delta.value.numpy(), new)


def test_no_tile_of_the_wire_is_too_large_for_the_kernels() -> None:
    assert WIRE_TILE_ELEMENTS == TILE_ELEMENTS
