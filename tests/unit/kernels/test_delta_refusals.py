"""What is no delta of these words is refused by name, and nothing outside a tile is touched."""

from dataclasses import replace

import pytest
import torch

from etude.kernels import delta as deltas
from etude.kernels import dispatch
from etude.kernels.tiles import (
    TILE_ELEMENTS,
    Rectangle,
    Tiles,
    contiguous_tiles,
    even_bounds,
    rectangle_tiles,
)


@pytest.fixture
def tiles(device: torch.device) -> Tiles:
    return contiguous_tiles([0, 4, 10], bits=16, device=device)


def staged(tiles: Tiles, counts: list[int], index: list[int]) -> deltas.Delta:
    device = tiles.base.device
    return deltas.staged_delta(
        tiles,
        counts=torch.tensor(counts, dtype=torch.int32, device=device),
        index=torch.tensor(index, dtype=torch.int32, device=device),
        value=torch.full((len(index),), 9, dtype=torch.int16, device=device),
    )


def test_entries_outside_their_tile_touch_nothing(tiles: Tiles, device: torch.device) -> None:
    delta = staged(tiles, [3, 2], [1, 4, 2**31 - 1, -1, 6])
    live = torch.arange(10, dtype=torch.int16, device=device)
    prepared = deltas.delta_prepare(live, delta=delta)
    old = deltas.delta_apply(live, delta=delta)
    assert live.tolist() == [0, 9, *range(2, 10)]
    assert old.view(torch.int16).tolist() == [1, 0, 0, 0, 0]
    only = staged(tiles, [1, 0], [1])
    unchanged = torch.arange(10, dtype=torch.int16, device=device)
    assert torch.equal(prepared.digest, deltas.delta_prepare(unchanged, delta=only).digest)


@pytest.mark.parametrize(
    ("counts", "index", "message"),
    [
        ([1, 1], [4, 0], "outside its tile"),
        ([1, 1], [-1, 0], "outside its tile"),
        ([2, 0], [2, 1], "does not rise"),
        ([0, 2], [3, 3], "does not rise"),
    ],
)
def test_a_checked_run_refuses_them_by_name(
    counts: list[int],
    index: list[int],
    message: str,
    tiles: Tiles,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "CHECKED", True)
    live = torch.zeros(10, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=message):
        deltas.delta_apply(live, delta=staged(tiles, counts, index))
    assert not live.any()
    deltas.delta_apply(live, delta=staged(tiles, [2, 2], [0, 3, 0, 5]))
    assert live.count_nonzero() == 4


def test_a_checked_run_refuses_entries_that_tiles_share(tiles, device, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "CHECKED", True)
    delta = staged(tiles, [2, 2], [0, 3, 0, 5])
    live = torch.zeros(10, dtype=torch.uint16, device=device)
    with pytest.raises(ValueError, match="follow each other"):
        deltas.delta_apply(live, delta=replace(delta, starts=delta.starts * 0))


def test_words_that_do_not_fit_are_refused(tiles: Tiles, device: torch.device) -> None:
    short, wide = torch.zeros(9, device=device).half(), torch.zeros(10, device=device)
    fits = wide.half()
    with pytest.raises(ValueError, match="9 elements, its tiles end at 10"):
        deltas.delta_scan(short, short, tiles=tiles, capacity=1)
    with pytest.raises(ValueError, match="old has 32 bits"):
        deltas.delta_scan(wide, wide, tiles=tiles, capacity=1)
    with pytest.raises(ValueError, match=r"old is torch.float16 .* new is torch.bfloat16"):
        deltas.delta_scan(fits, fits.bfloat16(), tiles=tiles, capacity=1)
    with pytest.raises(ValueError, match="capacity is -1"):
        deltas.delta_scan(fits, fits, tiles=tiles, capacity=-1)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        deltas.cast_scan(wide, fits, tiles=tiles, capacity=1)
    delta = deltas.delta_scan(fits, fits + 1, tiles=tiles, capacity=10)
    with pytest.raises(ValueError, match="live has 32 bits"):
        deltas.delta_apply(wide, delta=delta)
    with pytest.raises(ValueError, match="not contiguous"):
        deltas.delta_apply(torch.zeros(10, 2, device=device).half()[:, 0], delta=delta)
    with pytest.raises(ValueError, match="old is"):
        deltas.delta_undo(fits, delta=delta, old=fits)


def test_columns_that_do_not_belong_together_are_refused(tiles: Tiles, device) -> None:
    delta = staged(tiles, [1, 1], [0, 0])
    live = torch.zeros(10, dtype=torch.uint16, device=device)
    with pytest.raises(ValueError, match="counts add up to 3, index has 2"):
        deltas.delta_apply(live, delta=replace(delta, counts=delta.counts + delta.starts.int()))
    negative = torch.tensor([-1, 3], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="negative entry"):
        deltas.delta_apply(live, delta=replace(delta, counts=negative))
    with pytest.raises(ValueError, match="value is"):
        deltas.delta_apply(live, delta=replace(delta, value=delta.value[:1]))
    with pytest.raises(ValueError, match=r"index is torch\.int64"):
        deltas.delta_apply(live, delta=replace(delta, index=delta.index.long()))


def test_tiles_that_no_buffer_has_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"tile 1 has {TILE_ELEMENTS + 1} elements"):
        contiguous_tiles([0, 5, TILE_ELEMENTS + 6], bits=16, device=device)
    for bounds in ([3, 2], [-1, 2]):
        with pytest.raises(ValueError, match="must not fall nor be negative"):
            contiguous_tiles(bounds, bits=16, device=device)
    with pytest.raises(ValueError, match="bounds is empty"):
        contiguous_tiles([], bits=16, device=device)
    with pytest.raises(ValueError, match="bits is 64"):
        contiguous_tiles([0, 1], bits=64, device=device)
    with pytest.raises(ValueError, match="tile 0 has a negative field"):
        rectangle_tiles([Rectangle(0, 1, 1, 1, -1, 0)], bits=16, device=device)
    with pytest.raises(ValueError, match="rows of 4, 3 apart"):
        rectangle_tiles([Rectangle(0, 2, 4, 3, 0, 4)], bits=16, device=device)


def test_a_scan_of_rectangles_is_refused(device: torch.device) -> None:
    tiles = rectangle_tiles([Rectangle(0, 2, 2, 4, 0, 2)], bits=16, device=device)
    words = torch.zeros(8, device=device).half()
    with pytest.raises(ValueError, match="not contiguous"):
        deltas.delta_scan(words, words, tiles=tiles, capacity=1)


def test_even_bounds_cover_a_tensor_with_the_fewest_tiles() -> None:
    assert even_bounds(0).tolist() == [0]
    assert even_bounds(5).tolist() == [0, 5]
    assert even_bounds(TILE_ELEMENTS).tolist() == [0, TILE_ELEMENTS]
    assert even_bounds(TILE_ELEMENTS + 1).tolist() == [0, TILE_ELEMENTS, TILE_ELEMENTS + 1]


def test_tiles_far_beyond_two_to_the_31_keep_their_places() -> None:
    far = contiguous_tiles([2**33, 2**33 + 5], bits=32, first_lane=1, device="cpu")
    assert far.end == 2**33 + 5
    assert far.base.tolist() == [2**33]
    assert far.lane.tolist() == [2**34 + 1]


def test_an_unknown_body_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="ETUDE_KERNELS='cuda'"):
        dispatch.forced_body({"ETUDE_KERNELS": "cuda"})
    assert dispatch.forced_body({}) == ""


def test_starts_beyond_the_entries_reach_no_other_memory(tiles: Tiles, device) -> None:
    # Under the interpreter the watch fails the test at an access outside any argument.
    delta = staged(tiles, [2, 2], [0, 3, 0, 5])
    live = torch.zeros(10, dtype=torch.uint16, device=device)
    assert deltas.delta_apply(live, delta=replace(delta, starts=delta.starts + 3)).shape == (4,)
    assert deltas.delta_apply(live, delta=replace(delta, starts=delta.starts - 3)).shape == (4,)
