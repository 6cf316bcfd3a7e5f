"""Deltas on a real GPU: the same laws, tensors beyond 2^31 elements, no waiting, graph capture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etude.kernels import delta as deltas
from etude.kernels import delta_reference, digest_reference, dispatch
from etude.kernels.digest import digest_scan
from etude.kernels.raw_words import raw_words
from etude.kernels.tiles import contiguous_tiles, even_bounds

KERNELS = Path(__file__).parents[1] / "unit" / "kernels"
LAWS = (
    "test_delta_laws.py",
    "test_delta_cast.py",
    "test_delta_digest.py",
    "test_delta_axis.py",
    "test_delta_refusals.py",
)

if not torch.cuda.is_available():
    if os.environ.get("ETUDE_REQUIRE") == "gpu":
        pytest.fail("ETUDE_REQUIRE=gpu, and CUDA has no device", pytrace=False)
    pytest.skip("no GPU", allow_module_level=True)


def pair(elements: int, density: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bf16 tensors that differ in about this share of their elements."""
    rng = torch.Generator("cuda").manual_seed(elements)
    old = torch.randn(elements, generator=rng, device="cuda").bfloat16()
    differs = torch.rand(elements, generator=rng, device="cuda") < density
    return old, (old.view(torch.int16) ^ differs.to(torch.int16)).view(torch.bfloat16)


def test_the_laws_hold_for_triton_bodies_on_the_gpu() -> None:
    words = (sys.executable, "-m", "pytest", "-q", f"--confcutdir={KERNELS}")
    env = os.environ | {"ETUDE_TEST_DEVICE": "cuda"}
    files = [str(KERNELS / name) for name in LAWS]
    done = subprocess.run([*words, *files], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


@pytest.mark.parametrize("density", [0.0, 0.002, 0.02, 0.5, 1.0])
def test_bodies_and_reference_agree_on_a_layer_three_times_over(density: float) -> None:
    assert not dispatch.FORCED
    old, new = pair(20_000_000, density)
    tiles = contiguous_tiles(even_bounds(old.numel()), bits=16, first_lane=3, device="cuda")
    before, after = raw_words(old, name="old"), raw_words(new, name="new")
    right = delta_reference.scan(before, after, tiles=tiles, capacity=old.numel())
    total = int(right.counts.sum())
    change = digest_reference.digest_scan(after, first_lane=3) - digest_reference.digest_scan(
        before, first_lane=3
    )
    for _ in range(3):
        delta = deltas.delta_scan(old, new, tiles=tiles, capacity=total)
        assert torch.equal(delta.counts, right.counts)
        assert torch.equal(delta.starts, right.starts)
        assert torch.equal(delta.index, right.index[:total])
        assert torch.equal(delta.value.view(torch.int16), right.value[:total].view(torch.int16))
        assert torch.equal(delta.digest, change)
        live = old.clone()
        kept = deltas.delta_apply(live, delta=delta)
        assert torch.equal(live.view(torch.int16), new.view(torch.int16))
        deltas.delta_undo(live, delta=delta, old=kept)
        assert torch.equal(live.view(torch.int16), old.view(torch.int16))


def test_places_beyond_two_to_the_31_are_reached() -> None:
    elements = 2**31 + 700_001
    live = torch.zeros(elements, dtype=torch.uint8, device="cuda")
    new = live.clone()
    spots = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 1, elements - 1], device="cuda")
    new[spots] = 7
    tiles = contiguous_tiles(even_bounds(elements), bits=8, device="cuda")
    delta = deltas.delta_scan(live, new, tiles=tiles, capacity=10)
    assert int(delta.counts.sum()) == spots.numel()
    assert torch.equal(digest_scan(live) + delta.digest, digest_scan(new))
    deltas.delta_apply(live, delta=delta)
    assert torch.equal(live, new)


def test_a_scan_does_not_wait_for_the_device() -> None:
    old, new = pair(3_000_000, 0.01)
    tiles = contiguous_tiles(even_bounds(old.numel()), bits=16, device="cuda")
    deltas.delta_scan(old, new, tiles=tiles, capacity=100_000)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        delta = deltas.delta_scan(old, new, tiles=tiles, capacity=100_000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not delta.overflow


def test_a_captured_step_publishes_each_masters_own_changes() -> None:
    old, _ = pair(1_000_000, 0.0)
    master = old.float()
    tiles = contiguous_tiles(even_bounds(old.numel()), bits=16, device="cuda")
    deltas.cast_scan(master, old, tiles=tiles, capacity=old.numel())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        published = deltas.cast_scan(master, old, tiles=tiles, capacity=old.numel())
    for factor in (1.0, 1.004, 1.1):
        master.copy_(old.float() * factor)
        graph.replay()
        assert torch.equal(published.new, master.bfloat16())
        live = old.clone()
        deltas.delta_apply(live, delta=published.delta)
        assert torch.equal(live, published.new)
