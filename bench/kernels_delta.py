"""Deltas on one GPU: a version's swap and a step's publishing, against what others do there.

python bench/kernels_delta.py [--elements 8_000_000_000] [--densities 0.002,0.01,0.03]

Needs torch, Triton and numpy alone: PYTHONPATH=kernels on a machine without the project. Results
are checked before anything is timed. Every input is far larger than the L2 cache, and ours and the
peers take turns; a figure is the median over the turns of `do_bench` medians.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from etude.kernels import delta as deltas
from etude.kernels.digest import digest_scan
from etude.kernels.tiles import Tiles, contiguous_tiles, even_bounds

OUT = Path(__file__).parent / "out" / "kernels_delta.json"
PIECE = 1 << 28
"""Elements of a peer's dense tensor: a large parameter."""
TURNS = 3
PINNED = 1 << 31
"""Bytes of the host copy whose bandwidth stands for a dense reload."""

Clock = Callable[[Callable[[], object]], float]
"""Milliseconds of one call."""


class Model(NamedTuple):
    """One version in memory, the next one, and the delta between them."""

    old: Tensor
    new: Tensor
    tiles: Tiles
    capacity: int
    delta: deltas.Delta
    flat: Tensor
    """Places of the changes, as the peers want them. int64 [k]"""
    value: Tensor
    """New bf16 values at these places. [k]"""

    @property
    def changed(self) -> int:
        return self.flat.numel()

    @property
    def num_bytes(self) -> int:
        return self.old.nbytes


def model(elements: int, density: float, device: str) -> Model:
    """Seeded weights, each changed by one ulp with this probability."""
    rng = torch.Generator(device).manual_seed(17)
    old = torch.empty(elements, dtype=torch.bfloat16, device=device).normal_(
        std=0.02, generator=rng
    )
    new = old.clone()
    flat = []
    for start in range(0, elements, PIECE):
        bits = new[start : start + PIECE].view(torch.int16)
        chosen = torch.rand(bits.shape, generator=rng, device=device) < density
        bits.bitwise_xor_(chosen.to(torch.int16))
        flat.append(chosen.nonzero().view(-1) + start)
    places = torch.cat(flat)
    tiles = contiguous_tiles(even_bounds(elements), bits=16, device=device)
    capacity = places.numel() + places.numel() // 8 + 1024
    delta = deltas.delta_scan(old, new, tiles=tiles, capacity=capacity)
    return Model(old, new, tiles, capacity, delta, places, new[places])


def require(seen: Tensor, right: Tensor, *, what: str) -> None:
    """Stop rather than time a wrong kernel.

    Raises:
        SystemExit: the tensors differ.
    """
    if not torch.equal(seen, right):
        raise SystemExit(f"kernels_delta: {what} is wrong")


def check(it: Model) -> None:
    """Every function on the whole model, its fresh outputs poisoned, before any is timed."""
    # Fills what torch.empty gives: an element that no kernel writes shows.
    torch.use_deterministic_algorithms(mode=True)
    start = it.tiles.base
    local = it.delta.index[: it.changed].to(torch.int64)
    tile = torch.repeat_interleave(it.delta.counts.to(torch.int64), output_size=it.changed)
    require(start[tile] + local, it.flat, what="the places of the scan")
    live = it.old.clone()
    prepared = deltas.delta_prepare(live, delta=it.delta)
    require(digest_scan(live) + prepared.digest, digest_scan(it.new), what="the digest")
    deltas.delta_apply(live, delta=it.delta)
    require(live.view(torch.int16), it.new.view(torch.int16), what="the applied model")
    deltas.delta_undo(live, delta=it.delta, old=prepared.old)
    require(live.view(torch.int16), it.old.view(torch.int16), what="the model after the undo")
    torch.use_deterministic_algorithms(mode=False)


def swap(it: Model) -> dict[str, Callable[[], object]]:
    """What a receiver does to swap a version in, by name."""
    live, kept = it.old.clone(), deltas.delta_prepare(it.old, delta=it.delta).old

    def apply_undo_digest() -> None:
        deltas.delta_prepare(live, delta=it.delta)
        deltas.delta_apply(live, delta=it.delta)
        deltas.delta_undo(live, delta=it.delta, old=kept)

    def nan_mask() -> None:
        """A dense tensor full of NaN, filled where it changed, merged by `where`: per parameter."""
        ends = torch.searchsorted(
            it.flat, torch.arange(0, live.numel() + PIECE, PIECE).to(live.device)
        )
        marks = ends.tolist()
        for piece, (a, b) in enumerate(itertools.pairwise(marks)):
            part = live[piece * PIECE : (piece + 1) * PIECE]
            patch = torch.full_like(part, float("nan"))
            patch.index_copy_(0, it.flat[a:b] - piece * PIECE, it.value[a:b])
            part.copy_(torch.where(patch.isnan(), part, patch))

    return {
        "device copy of the model": lambda: live.copy_(it.new),
        "ours: digest + apply + undo": apply_undo_digest,
        "ours: apply alone": lambda: deltas.delta_apply(live, delta=it.delta),
        "index_put_, no undo, no digest": lambda: live.index_put_((it.flat,), it.value),
        "index_copy_, no undo, no digest": lambda: live.index_copy_(0, it.flat, it.value),
        "NaN mask, no undo, no digest": nan_mask,
    }


def publish(it: Model, elements: int) -> dict[str, Callable[[], object]]:
    """What a trainer does to find a step's changes; the fp32 master is made for a part."""
    old, new = it.old[:elements], it.new[:elements]
    tiles = contiguous_tiles(even_bounds(elements), bits=16, device=it.old.device)
    master, spare = new.float(), torch.empty_like(new)

    def peer() -> None:
        """Cast, compare, list, gather: plain torch. It lists int64 places, and has no digest."""
        cast = master.to(torch.bfloat16)
        places = (cast.view(torch.int16) != old.view(torch.int16)).nonzero().view(-1)
        cast[places]

    return {
        "device copy of the part": lambda: spare.copy_(new),
        "ours: scan": lambda: deltas.delta_scan(old, new, tiles=tiles, capacity=it.capacity),
        "ours: cast + scan": lambda: deltas.cast_scan(
            master, old, tiles=tiles, capacity=it.capacity
        ),
        "torch: cast, ne, nonzero, gather": peer,
        "digest of the part": lambda: digest_scan(new),
    }


def timed(contenders: dict[str, Callable[[], object]], clock: Clock) -> dict[str, float]:
    """Median milliseconds of each, all taking turns."""
    turns = [{name: clock(act) for name, act in contenders.items()} for _ in range(TURNS)]
    return {name: statistics.median(turn[name] for turn in turns) for name in contenders}


def pinned_ms(it: Model, clock: Clock) -> float:
    """A dense reload of the model from pinned host memory, from the bandwidth of a part."""
    host = torch.empty(min(PINNED, it.num_bytes), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=it.old.device)
    return clock(lambda: target.copy_(host, non_blocking=True)) * it.num_bytes / host.nbytes


def ratios(swaps: dict[str, float], steps: dict[str, float], pinned: float) -> dict[str, float]:
    """What is claimed, as one number each."""
    ours, copy = swaps["ours: digest + apply + undo"], swaps["device copy of the model"]
    apply = swaps["ours: apply alone"]
    # Bytes per element: a copy reads 2 and writes 2, a scan reads 4, a cast reads 6 and writes 2.
    return {
        "digest + apply + undo / device copy (goal <= 0.5)": ours / copy,
        "index_put_ / our apply": swaps["index_put_, no undo, no digest"] / apply,
        "index_copy_ / our apply": swaps["index_copy_, no undo, no digest"] / apply,
        "NaN mask / our apply": swaps["NaN mask, no undo, no digest"] / apply,
        "pinned dense reload / ours (goal >= 50)": pinned / ours,
        "scan bandwidth / copy bandwidth (goal >= 0.85)": steps["device copy of the part"]
        / steps["ours: scan"],
        "cast + scan bandwidth / copy bandwidth (goal >= 0.85)": 2
        * steps["device copy of the part"]
        / steps["ours: cast + scan"],
        "torch cast, ne, nonzero / our cast + scan": steps["torch: cast, ne, nonzero, gather"]
        / steps["ours: cast + scan"],
    }


def figures(elements: int, density: float, *, device: str, clock: Clock) -> dict[str, float]:
    """Check, time and compare one model at one density; prints the times as they come."""
    it = model(elements, density, device)
    check(it)
    print(f"\n{elements:,} bf16 elements, {it.changed / elements:.3%} changed; results are right")
    swaps = timed(swap(it), clock)
    steps = timed(publish(it, elements // 4), clock)
    pinned = pinned_ms(it, clock)
    times = swaps | steps | {"pinned host copy of the model (from a part)": pinned}
    for name, milliseconds in times.items():
        print(f"  {name:<46} {milliseconds:10.3f} ms")
    found = ratios(swaps, steps, pinned)
    for name, ratio in found.items():
        print(f"  {name:<60} {ratio:8.2f}")
    return times | found


def main() -> None:
    """Print one table per density, and write bench/out/kernels_delta.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=8_000_000_000)
    parser.add_argument("--densities", default="0.002,0.01,0.03")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels_delta: no GPU: not measured")
        return
    from triton.testing import do_bench  # noqa: PLC0415 - only a machine with a GPU needs it

    def clock(act: Callable[[], object]) -> float:
        return float(do_bench(act, warmup=50, rep=300, return_mode="median"))

    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {sys.version.split()[0]}"
    print(machine)
    rows: dict[str, object] = {"machine": machine, "elements": options.elements}
    for density in map(float, options.densities.split(",")):
        rows[str(density)] = figures(options.elements, density, device="cuda", clock=clock)
        torch.cuda.empty_cache()
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
