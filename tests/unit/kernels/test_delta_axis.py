"""Deltas of differences: resolved against live words they become the delta of the new bits."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.kernels import delta as deltas
from etude.kernels import dispatch
from etude.kernels.digest import digest_scan
from etude.kernels.raw_words import Axis
from etude.kernels.tiles import contiguous_tiles

EXAMPLES = settings(
    max_examples=10 if dispatch.INTERPRETED else 60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def key(word: int, bits: int) -> int:
    """A word's place on the ulp axis, by its definition."""
    top = 1 << (bits - 1)
    return word ^ top if word < top else (1 << bits) - 1 - word


def step(old: int, new: int, bits: int, axis: Axis) -> int:
    if axis is Axis.PLAIN:
        return (new - old) % (1 << bits)
    return (key(new, bits) - key(old, bits)) % (1 << bits)


@EXAMPLES
@given(
    bits=st.sampled_from([8, 16, 32]),
    axis=st.sampled_from([Axis.PLAIN, Axis.ORDERED]),
    seed=st.integers(0, 2**32),
    near=st.booleans(),
)
def test_differences_resolve_to_the_new_bits(bits, axis, seed, near, device):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << bits, 300, dtype=np.uint64).astype(WORDS[bits])
    new = old.copy()
    chosen = np.flatnonzero(rng.random(old.size) < 0.3)
    change = rng.integers(1, 3 if near else 1 << bits, chosen.size, dtype=np.uint64)
    new[chosen] += change.astype(WORDS[bits])
    # Both zeros, both ends of the axis, and their neighbours.
    corners = [0, 1, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1]
    old[:5], new[:5] = corners, corners[::-1]
    live = torch.from_numpy(old.copy()).to(device)
    target = torch.from_numpy(new).to(device)
    tiles = contiguous_tiles([0, 100, 300], bits=bits, first_lane=5, device=device)
    right = deltas.delta_scan(live, target, tiles=tiles, capacity=300)
    places = np.flatnonzero(old != new)
    steps = [step(int(old[p]), int(new[p]), bits, axis) for p in places]
    staged = deltas.staged_delta(
        tiles,
        counts=right.counts,
        index=right.index[: places.size].clone(),
        value=torch.from_numpy(np.array(steps, WORDS[bits])).to(device),
    )
    resolved = deltas.delta_resolve(live, delta=staged, axis=axis)
    assert np.array_equal(resolved.delta.value.cpu().numpy(), new[places])
    assert np.array_equal(resolved.old.cpu().numpy(), old[places])
    assert torch.equal(resolved.delta.digest, right.digest)
    assert np.array_equal(live.cpu().numpy(), old)
    for _ in range(2):
        deltas.delta_apply(live, delta=resolved.delta)
        assert np.array_equal(live.cpu().numpy(), new)
    assert torch.equal(digest_scan(live), digest_scan(target))
    deltas.delta_undo(live, delta=resolved.delta, old=resolved.old)
    assert np.array_equal(live.cpu().numpy(), old)


def test_new_bits_are_not_resolved_again(device):
    words = torch.zeros(4, dtype=torch.uint8, device=device)
    tiles = contiguous_tiles([0, 4], bits=8, device=device)
    delta = deltas.delta_scan(words, words + 1, tiles=tiles, capacity=4)
    with pytest.raises(ValueError, match="ABSOLUTE"):
        deltas.delta_resolve(words, delta=delta, axis=Axis.ABSOLUTE)
