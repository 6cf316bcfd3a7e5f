"""What an optimiser step publishes: the master rounded to bf16, and what that changed."""

import numpy as np
import torch

from etude.kernels.delta import cast_scan, delta_scan
from etude.kernels.tiles import contiguous_tiles, even_bounds


def every_corner() -> torch.Tensor:
    """All bf16 patterns, each with the low halves where rounding turns."""
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32)
    return torch.from_numpy((high | low).reshape(-1).view(np.float32))


def test_the_master_is_rounded_to_the_nearest_even_at_every_corner(device):
    master = every_corner().to(device)
    tiles = contiguous_tiles(even_bounds(master.numel()), bits=16, device=device)
    old = torch.zeros_like(master, dtype=torch.bfloat16)
    new = cast_scan(master, old, tiles=tiles, capacity=0).new
    expected = master.to(torch.bfloat16)
    is_nan = master.isnan()
    assert torch.equal(new[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))
    assert new[is_nan].isnan().all()
    assert torch.equal(new[is_nan].signbit(), master[is_nan].signbit())


def test_a_cast_and_a_scan_in_one_are_the_two_after_each_other(device):
    rng = torch.Generator().manual_seed(2)
    before = torch.randn(3, 4000, generator=rng)
    old = before.to(torch.bfloat16).to(device)
    master = (before + 1e-3 * torch.randn(before.shape, generator=rng)).to(device)
    tiles = contiguous_tiles([0, 5000, 5001, 12_000], bits=16, first_lane=9, device=device)
    cast = cast_scan(master, old, tiles=tiles, capacity=12_000)
    assert cast.new.shape == master.shape
    plain = delta_scan(old, cast.new, tiles=tiles, capacity=12_000)
    total = int(plain.counts.sum())
    assert 0 < total < 12_000
    for name in ("counts", "starts", "digest", "overflow"):
        assert torch.equal(getattr(cast.delta, name), getattr(plain, name)), name
    for name in ("index", "value"):
        ours, theirs = getattr(cast.delta, name).cpu(), getattr(plain, name).cpu()
        assert torch.equal(ours[:total], theirs[:total]), name
    assert torch.equal(old, before.to(torch.bfloat16).to(device))


def test_an_overflow_still_gives_the_new_values(device):
    master = torch.ones(5000, device=device)
    tiles = contiguous_tiles([0, 5000], bits=16, device=device)
    cast = cast_scan(master, torch.zeros_like(master).bfloat16(), tiles=tiles, capacity=4999)
    assert cast.delta.overflow
    assert torch.equal(cast.new, master.bfloat16())
