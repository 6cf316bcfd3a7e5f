"""Deltas of any two tensors: found exactly, predicted, applied, repeated, undone.

The same laws hold the reference and, where Triton is forced, its bodies.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.kernels import delta as deltas
from etude.kernels import dispatch
from etude.kernels.digest import digest_lanes, digest_scan
from etude.kernels.tiles import Rectangle, contiguous_tiles, rectangle_tiles

EXAMPLES = settings(
    max_examples=10 if dispatch.INTERPRETED else 60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32}
DENSITIES = (0.0, 0.001, 0.3, 1.0)


class Pair(NamedTuple):
    """Two tensors as words, and the tiles over a part of them."""

    old: np.ndarray[Any, Any]
    new: np.ndarray[Any, Any]
    bounds: list[int]
    bits: int
    lane: int

    @property
    def changed(self) -> list[np.ndarray[Any, Any]]:
        """Tile-local places, by numpy."""
        pieces = zip(self.bounds[:-1], self.bounds[1:], strict=True)
        return [np.flatnonzero(self.old[a:b] != self.new[a:b]) for a, b in pieces]

    @property
    def total(self) -> int:
        return sum(p.size for p in self.changed)

    @property
    def flat(self) -> np.ndarray[Any, Any]:
        starts = self.bounds[:-1]
        return np.concatenate([p + a for p, a in zip(self.changed, starts, strict=True)])


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    bits = draw(st.sampled_from([8, 16, 32]))
    n = draw(st.sampled_from([1, 31, 33, 4096, 4097, 9000]))
    marks = draw(st.lists(st.integers(0, n), max_size=3))
    bounds = sorted(draw(st.sampled_from([[0, n], [n // 3, n]])) + marks)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 1 << bits, n, dtype=np.uint64).astype(WORDS[bits])
    new = old.copy()
    chosen = rng.random(n) < draw(st.sampled_from(DENSITIES))
    new[chosen] ^= rng.integers(1, 1 << bits, n, dtype=np.uint64).astype(WORDS[bits])[chosen]
    return Pair(old, new, bounds, bits, draw(st.sampled_from([0, 7, 1 << 40])))


def scanned(pair: Pair, device: torch.device, capacity: int | None = None) -> deltas.Delta:
    tiles = contiguous_tiles(pair.bounds, bits=pair.bits, first_lane=pair.lane, device=device)
    room = pair.total if capacity is None else capacity
    return deltas.delta_scan(
        put(pair.old, device), put(pair.new, device), tiles=tiles, capacity=room
    )


def put(words: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(words.copy()).to(device)


def got(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()


def predicted(pair: Pair, digests: Any) -> tuple[int, int]:
    flat = pair.flat
    lanes = [pair.lane + int(p) * max(1, pair.bits // 16) for p in flat]
    after = digests.of(pair.new[flat].tolist(), lanes, pair.bits)
    before = digests.of(pair.old[flat].tolist(), lanes, pair.bits)
    return (after[0] - before[0]) % (1 << 64), (after[1] - before[1]) % (1 << 64)


@EXAMPLES
@given(pair=pairs(), spare=st.integers(0, 5))
def test_a_scan_finds_exactly_what_differs_in_order(pair: Pair, spare: int, device, digests):
    delta = scanned(pair, device, capacity=pair.total + spare)
    assert got(delta.counts).tolist() == [p.size for p in pair.changed]
    assert got(delta.starts).tolist() == np.cumsum([0, *got(delta.counts)])[:-1].tolist()
    assert not delta.overflow
    assert np.array_equal(got(delta.index)[: pair.total], np.concatenate(pair.changed))
    assert np.array_equal(got(delta.value)[: pair.total], pair.new[pair.flat])
    assert delta.value.dtype == put(pair.old, device).dtype
    assert digest_lanes(delta.digest) == predicted(pair, digests)


@EXAMPLES
@given(pair=pairs())
def test_a_prepare_predicts_and_writes_nothing(pair: Pair, device, digests):
    delta, live = scanned(pair, device), put(pair.old, device)
    prepared = deltas.delta_prepare(live, delta=delta)
    assert np.array_equal(got(prepared.old), pair.old[pair.flat])
    assert digest_lanes(prepared.digest) == predicted(pair, digests)
    assert np.array_equal(got(live), pair.old)


@EXAMPLES
@given(pair=pairs())
def test_applying_and_undoing_restore_bytes_however_often(pair: Pair, device):
    delta, live = scanned(pair, device), put(pair.old, device)
    expected = pair.old.copy()
    expected[pair.flat] = pair.new[pair.flat]
    old = deltas.delta_prepare(live, delta=delta).old
    for seen in (pair.old, pair.new):
        assert np.array_equal(got(deltas.delta_apply(live, delta=delta)), seen[pair.flat])
        assert np.array_equal(got(live), expected)
    for seen in (pair.new, pair.old):
        back = deltas.delta_undo(live, delta=delta, old=old)
        assert np.array_equal(got(back), seen[pair.flat])
        assert np.array_equal(got(live), pair.old)


@EXAMPLES
@given(pair=pairs(), missing=st.integers(1, 3))
def test_more_changes_than_capacity_raise_the_flag_and_are_never_cut_off(pair, missing, device):
    if pair.total < missing:
        return
    delta = scanned(pair, device, capacity=pair.total - missing)
    assert delta.overflow
    assert got(delta.counts).tolist() == [p.size for p in pair.changed]
    assert digest_lanes(delta.digest) == (0, 0)
    live = put(pair.old, device)
    for act in (deltas.delta_prepare, deltas.delta_apply):
        with pytest.raises(ValueError, match="overflow"):
            act(live, delta=delta)
    assert np.array_equal(got(live), pair.old)


@EXAMPLES
@given(pair=pairs())
def test_the_digest_of_the_new_is_the_old_ones_and_the_changes(pair: Pair, device):
    whole = pair._replace(bounds=[0, pair.old.size])
    delta = scanned(whole, device)
    before = digest_scan(put(pair.old, device), first_lane=pair.lane)
    after = digest_scan(put(pair.new, device), first_lane=pair.lane)
    assert torch.equal(before + delta.digest, after)


@EXAMPLES
@given(pair=pairs())
def test_a_staged_delta_does_what_the_scanned_one_does(pair: Pair, device):
    scan, live = scanned(pair, device), put(pair.old, device)
    staged = deltas.staged_delta(scan.tiles, counts=scan.counts, index=scan.index, value=scan.value)
    assert torch.equal(deltas.delta_prepare(live, delta=staged).digest, scan.digest)
    deltas.delta_apply(live, delta=staged)
    assert np.array_equal(got(live)[pair.flat], pair.new[pair.flat])


def test_a_hundred_versions_arrive_and_leave_bit_for_bit(device):
    rng = np.random.default_rng(3)
    words = rng.integers(0, 1 << 16, 6000, dtype=np.uint16)
    live = put(words, device).view(torch.bfloat16)
    start, digest = words.copy(), digest_scan(live)
    undo = []
    for _ in range(100):
        new = words.copy()
        spots = rng.integers(0, words.size, rng.integers(0, 60))
        new[spots] += rng.integers(1, 3, spots.size, dtype=np.uint16)
        delta = scanned(Pair(words, new, [0, 2500, 6000], 16, 0), device)
        prepared = deltas.delta_prepare(live, delta=delta)
        deltas.delta_apply(live, delta=delta)
        digest, words = digest + prepared.digest, new
        undo.append((delta, prepared.old))
        assert np.array_equal(got(live.view(torch.uint16)), words)
    assert torch.equal(digest_scan(live), digest)
    for delta, old in reversed(undo):
        deltas.delta_undo(live, delta=delta, old=old)
    assert np.array_equal(got(live.view(torch.uint16)), start)


def test_a_tile_of_many_rows_lands_in_its_rectangle_with_its_own_lanes(device, digests):
    # Rows 1 to 3, columns 4 to 8 of an 8 x 10 matrix, live as rows of 6 from place 5 on.
    rng = np.random.default_rng(1)
    tile = Rectangle(base=5, rows=3, width=4, pitch=6, lane=100 + 1 * 10 + 4, lane_pitch=10)
    tiles = rectangle_tiles([tile], bits=16, device=device)
    live = rng.integers(0, 1 << 16, 30, dtype=np.uint16)
    local = np.array([0, 3, 4, 7, 11])
    value = rng.integers(0, 1 << 16, local.size, dtype=np.uint16)
    places = 5 + local // 4 * 6 + local % 4
    lanes = (114 + local // 4 * 10 + local % 4).tolist()
    delta = deltas.staged_delta(
        tiles,
        counts=torch.tensor([local.size], dtype=torch.int32, device=device),
        index=torch.from_numpy(local.astype(np.int32)).to(device),
        value=put(value, device),
    )
    expected = live.copy()
    expected[places] = value
    words = put(live, device)
    up, down = digests.of(value.tolist(), lanes, 16), digests.of(live[places].tolist(), lanes, 16)
    assert digest_lanes(deltas.delta_prepare(words, delta=delta).digest) == tuple(
        (a - b) % (1 << 64) for a, b in zip(up, down, strict=True)
    )
    assert np.array_equal(got(deltas.delta_apply(words, delta=delta)), live[places])
    assert np.array_equal(got(words), expected)


def test_equal_scans_give_equal_bytes(device):
    rng = np.random.default_rng(5)
    old = rng.integers(0, 1 << 16, 20_000, dtype=np.uint16)
    new = np.where(rng.random(old.size) < 0.05, old + 1, old).astype(np.uint16)
    pair = Pair(old, new, [0, 9_999, 20_000], 16, 0)
    first, again = scanned(pair, device), scanned(pair, device)
    for name in ("counts", "starts", "index", "value", "digest", "overflow"):
        assert np.array_equal(got(getattr(first, name)), got(getattr(again, name))), name


def test_nothing_is_not_a_change(device):
    empty = put(np.empty(0, np.uint16), device)
    for bounds in ([0], [0, 0]):
        tiles = contiguous_tiles(bounds, bits=16, device=device)
        delta = deltas.delta_scan(empty, empty, tiles=tiles, capacity=0)
        assert not delta.overflow
        assert deltas.delta_apply(empty, delta=delta).numel() == 0
        assert digest_lanes(delta.digest) == digest_lanes(digest_scan(empty)) == (0, 0)
