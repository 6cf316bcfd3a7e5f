"""Ranks of a group read their own maps; together they count every element exactly once."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from tests.support.weights.publishing import TrainedPolicy
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError
from etude.common.weights import VersionId, VersionRef
from etude.common.weights.replicas.block_selection import select_slice
from etude.common.weights.replicas.live_weights import (
    LiveWeights,
    Region,
    identity_regions,
    slice_regions,
)
from etude.common.weights.replicas.regions import Regions
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.words import Words, word_type
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.swap.coordinator import SwapCoordinator
from etude.inference.swap.ranks import Ranks
from etude.inference.updates.staging import Stager
from etude.inference.worker import coverage
from etude.inference.worker.coverage import ComputedParameterError
from etude.inference.worker.device.live_weights import DeviceLiveWeights
from etude.inference.worker.rank import Rank

SCHEMA = Schema(
    grid=4,
    tensors=(
        TensorSpec(name="bias", dtype="F32", shape=(5,), split="rows"),
        TensorSpec(name="o", dtype="BF16", shape=(6, 8), split="columns"),
        TensorSpec(name="q", dtype="BF16", shape=(8, 6), split="rows"),
    ),
)


def flags(ranks: int) -> list[list[bool]]:
    maps = [coverage.region_rows(slice_regions(SCHEMA, rank, ranks)) for rank in range(ranks)]
    return [[bool(flag) for flag in each] for each in coverage.assign_counted(SCHEMA, maps)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_all_ranks_hold_counts_on_the_first_and_slices_count_on_each(ranks: int) -> None:
    assert flags(ranks) == [[True, True, True]] + [[False, True, True]] * (ranks - 1)


def region(start: int, stop: int, parameter: str = "bias") -> Region:
    size = stop - start
    return Region(parameter, 0, start, 1, size, size, size)


def counted(*ranks: Sequence[Region]) -> list[bytes]:
    schema = Schema(grid=1, tensors=SCHEMA.tensors[:1])
    return coverage.assign_counted(schema, [coverage.region_rows({0: held}) for held in ranks])


def test_a_region_that_a_lower_rank_holds_in_part_is_refused_by_name() -> None:
    with pytest.raises(CorruptError, match=r"'bias': rank 1 holds 3 elements .* 1 of which"):
        counted([region(0, 3)], [region(2, 5)])


def test_an_element_that_no_rank_holds_is_refused_by_name() -> None:
    with pytest.raises(ComputedParameterError, match="elements of tensor 'bias'"):
        counted([region(0, 2)], [region(3, 5)])


def test_copies_on_one_rank_are_left_to_that_rank() -> None:
    assert counted([region(0, 5)], [region(0, 5), region(0, 5, "tied")]) == [b"\1", b"\0\0"]
    assert counted([region(0, 2)], [region(2, 5), region(2, 5, "tied")]) == [b"\1", b"\1\1"]


def test_a_map_crosses_a_process_unchanged() -> None:
    regions = slice_regions(SCHEMA, 1, 2)
    assert np.array_equal(
        coverage.decode_regions(coverage.encode_regions(regions)), coverage.region_rows(regions)
    )


def ref(policy: TrainedPolicy, number: int) -> VersionRef:
    sha256 = f"{number:064x}"
    return VersionRef(epoch=1, number=number, manifest_sha256=sha256, state=policy.state().hex())


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_a_group_follows_versions_bit_for_bit_whoever_counts(
    ranks: int, info: EngineInfo, tmp_path: Path
) -> None:
    policy = TrainedPolicy(SCHEMA)
    engine = MemoryEngine(info, MemoryRanks(ranks))
    swap = engine.swap
    await swap.build_map(SCHEMA)
    policy.stage(tmp_path / "staged", None)
    await swap.prepare(tmp_path / "staged", ref(policy, 0), base=None, keep_old=False)
    await swap.activate()
    for number in range(1, 5):
        old = {name: words.copy() for name, words in policy.words.items()}
        policy.step()
        policy.stage(tmp_path / "staged", old)
        await swap.prepare(tmp_path / "staged", ref(policy, number), base=swap.live)
        await swap.activate()
        assert (await swap.scan()) == policy.state()
        assert all(
            np.array_equal(words["bias"], policy.words["bias"]) for words in engine.ranks.words
        )


class Places(Ranks):
    """Ranks that open their words as told."""

    def __init__(self, *openers: Callable[[Schema, bool], LiveWeights | DeviceLiveWeights]) -> None:
        self.ranks = [Rank(opener) for opener in openers]

    @override
    async def call(self, method: str, *args: object) -> Sequence[Any]:
        await asyncio.sleep(0)
        return [getattr(rank, method)(*args) for rank in self.ranks]


def zeros(regions: Regions) -> dict[str, Words]:
    return {
        SCHEMA.tensors[place].name: np.zeros(
            max(region.parameter_stop for region in held), word_type(SCHEMA.tensors[place].dtype)
        )
        for place, held in regions.items()
    }


def in_place(schema: Schema, rank: int, ranks: int) -> LiveWeights:
    regions = slice_regions(schema, rank, ranks)
    return LiveWeights(schema, zeros(regions), regions)


def on_device(schema: Schema, rank: int, ranks: int) -> DeviceLiveWeights:
    regions = slice_regions(schema, rank, ranks)
    tensors = {
        name: torch.from_numpy(words.view(f"i{words.itemsize}"))
        for name, words in zeros(regions).items()
    }
    return DeviceLiveWeights(schema, tensors, regions)


async def follow(
    swap: SwapCoordinator, policy: TrainedPolicy, path: Path, *, keep_old: bool
) -> None:
    policy.stage(path, None)
    await swap.prepare(path, ref(policy, 0), base=None, keep_old=False)
    await swap.activate()
    for number in range(1, 4):
        old = {name: words.copy() for name, words in policy.words.items()}
        policy.step(0.4)
        policy.stage(path, old)
        base = swap.live
        await swap.prepare(path, ref(policy, number), base=base, keep_old=keep_old)
        await swap.activate()
        assert await swap.scan() == policy.state()
        if keep_old:
            await swap.restore()
            assert (await swap.audit(), swap.live) == (True, base)
            policy.stage(path, old)
            await swap.prepare(path, ref(policy, number), base=swap.live)
            await swap.activate()


@pytest.mark.parametrize("keep_old", [True, False])
async def test_a_group_on_devices_follows_versions_and_takes_them_back(
    *, keep_old: bool, info: EngineInfo, tmp_path: Path
) -> None:
    ranks = Places(*(lambda schema, _, n=n: on_device(schema, n, 2) for n in range(2)))
    swap = SwapCoordinator(ranks, MemoryEngine(info))
    await swap.build_map(SCHEMA)
    await follow(swap, TrainedPolicy(SCHEMA), tmp_path / "staged", keep_old=keep_old)


def behind_a_loader(schema: Schema, rank: int, *, loads: bool) -> LiveWeights:
    """Rank 1 computes a tensor; behind the loader every rank has a copy of the checkpoint.

    Raises:
        ComputedParameterError: on rank 1, where nothing may be loaded.
    """
    if loads:
        regions = identity_regions(schema)
        return LiveWeights(schema, zeros(regions), regions)
    if rank == 1:
        raise ComputedParameterError("tensor 'q' is computed")
    return in_place(schema, rank, 2)


async def test_all_ranks_load_what_one_of_them_computes(info: EngineInfo, tmp_path: Path) -> None:
    asked: list[tuple[int, bool]] = []

    def opener(schema: Schema, loads: bool, rank: int) -> LiveWeights:  # noqa: FBT001 - as Rank
        asked.append((rank, loads))
        return behind_a_loader(schema, rank, loads=loads)

    ranks = Places(*(functools.partial(opener, rank=n) for n in range(2)))
    swap = SwapCoordinator(ranks, MemoryEngine(info))
    await swap.build_map(SCHEMA)
    assert asked == [(0, False), (1, False), (0, True), (1, True)]
    await follow(swap, TrainedPolicy(SCHEMA), tmp_path / "staged", keep_old=True)


async def test_what_a_rank_computes_is_refused_where_loading_is_not_wanted(
    info: EngineInfo,
) -> None:
    ranks = Places(
        *(lambda schema, loads, n=n: behind_a_loader(schema, n, loads=loads) for n in range(2))
    )
    swap = SwapCoordinator(ranks, MemoryEngine(info), may_load=False)
    with pytest.raises(ComputedParameterError, match="rank 1: tensor 'q' is computed"):
        await swap.build_map(SCHEMA)


LARGE = Schema(
    grid=4,
    tensors=(
        TensorSpec(name="down", dtype="BF16", shape=(256, 4096), split="columns"),
        TensorSpec(name="norm", dtype="BF16", shape=(256,), split="rows"),
        TensorSpec(name="up", dtype="BF16", shape=(4096, 256), split="rows"),
    ),
)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("receivers", [2, 4])
def test_each_of_several_receivers_fetches_and_counts_little_more_than_its_share(
    *, complete: bool, receivers: int, tmp_path: Path
) -> None:
    store = Counting()
    weights.claim_epoch(store, holder="trainer-0", parent=None, reason="start")
    policy = TrainedPolicy(LARGE)
    policy.publish(store, 0, complete=True)
    if not complete:
        policy.step(0.02)
        policy.publish(store, 1)
    version = VersionId(1, 0 if complete else 1)
    live = None if complete else weights.read_manifest(store, VersionId(1, 0)).ref
    [edge] = weights.plan_path(store, live, version)
    stager = Stager(store, "uid-run", tmp_path)
    for rank in range(receivers):
        store.num_bytes, before = 0, fetched(edge.kind)
        stager.stage_blocks(edge, LARGE, select_slice(LARGE, rank, receivers))
        assert 0 < store.num_bytes <= 1.1 / receivers * edge.num_bytes
        assert fetched(edge.kind) - before == store.num_bytes


def fetched(kind: str) -> float:
    """What the role says that it read."""
    labels = {"kind": kind, "codec": "blocks"}
    return REGISTRY.get_sample_value("etude_weights_bytes_total", labels) or 0.0


class Counting(MemoryStore):
    """Counts what is read."""

    num_bytes = 0

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        self.num_bytes += length
        return super().view(key, start, length)
