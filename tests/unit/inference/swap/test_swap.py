"""A swap reaches all ranks or none, and is never served half-way."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.weights.publishing import TrainedPolicy
from typing_extensions import override

from etude.common.errors import CorruptError, UnavailableError
from etude.common.weights import VersionRef
from etude.common.weights.replicas.live_weights import slice_regions
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.words import Words
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.swap.coordinator import SwapCoordinator

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="a.q_proj.weight", dtype="BF16", shape=(8, 6), split="rows"),
        TensorSpec(name="b.o_proj.weight", dtype="BF16", shape=(6, 8), split="columns"),
        TensorSpec(name="c.bias", dtype="F32", shape=(5,), split="rows"),
    ),
)


def ref(policy: TrainedPolicy, number: int, *, epoch: int = 1) -> VersionRef:
    return VersionRef(
        epoch=epoch,
        number=number,
        manifest_sha256=f"{number:064x}",
        state=policy.state().hex(),
    )


def words_on(policy: TrainedPolicy, rank: int, ranks: int) -> dict[str, Words]:
    """What a rank must hold, gathered element by element."""
    found = {}
    for place, regions in slice_regions(SCHEMA, rank, ranks).items():
        name = SCHEMA.tensors[place].name
        [region] = regions
        rows = [
            policy.words[name][region.source_offset + row * region.source_stride :][: region.width]
            for row in range(region.rows)
        ]
        found[name] = np.concatenate(rows)
    return found


def assert_holds(ranks: MemoryRanks, policy: TrainedPolicy) -> None:
    for rank, words in enumerate(ranks.words):
        expected = words_on(policy, rank, len(ranks.words))
        assert {n: w.tolist() for n, w in words.items()} == {
            n: w.tolist() for n, w in expected.items()
        }


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest, info: EngineInfo) -> MemoryEngine:
    return MemoryEngine(info, MemoryRanks(request.param))


@pytest.fixture
def policy() -> TrainedPolicy:
    return TrainedPolicy(SCHEMA)


async def take(
    swap: SwapCoordinator,
    policy: TrainedPolicy,
    target: VersionRef,
    folder: Path,
    old: dict[str, Words],
) -> None:
    policy.stage(folder / "staged", old)
    await swap.prepare(folder / "staged", target, base=swap.live)
    await swap.activate()


@pytest.fixture
async def swap(engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path) -> SwapCoordinator:
    """An engine that serves version 1.0."""
    await engine.swap.build_map(SCHEMA)
    policy.stage(tmp_path / "first", None)
    first = ref(policy, 0)
    await engine.swap.prepare(tmp_path / "first", first, base=None, keep_old=False)
    await engine.swap.activate()
    return engine.swap


async def next_version(
    swap: SwapCoordinator, policy: TrainedPolicy, folder: Path, number: int
) -> VersionRef:
    """Prepare a version that changes a tenth of the words."""
    old = {name: words.copy() for name, words in policy.words.items()}
    policy.step()
    target = ref(policy, number)
    policy.stage(folder / "staged", old)
    await swap.prepare(folder / "staged", target, base=swap.live)
    return target


async def test_after_a_commit_every_word_on_every_rank_is_the_trainers(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> None:
    for number in range(1, 6):
        target = await next_version(swap, policy, tmp_path, number)
        await swap.activate()
        assert_holds(engine.ranks, policy)
        assert (swap.live, engine.live) == (target, target.version)
        assert await swap.audit()


async def test_preparing_writes_nothing(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> None:
    before = [{n: w.copy() for n, w in words.items()} for words in engine.ranks.words]
    await next_version(swap, policy, tmp_path, 1)
    for words, old in zip(engine.ranks.words, before, strict=True):
        assert all(np.array_equal(words[name], old[name]) for name in old)


async def test_a_version_that_would_lead_elsewhere_is_refused_before_the_first_write(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> None:
    old = {name: words.copy() for name, words in policy.words.items()}
    policy.step()
    policy.stage(tmp_path / "staged", old)
    target = ref(policy, 1).model_copy(update={"state": "0" * 32})
    with pytest.raises(CorruptError, match="would lead to state"):
        await swap.prepare(tmp_path / "staged", target, base=swap.live)
    with pytest.raises(RuntimeError, match="prepare"):
        await swap.activate()
    assert "activate" not in engine.ranks.calls[-2:]
    assert await swap.audit()


async def test_a_version_on_another_base_is_never_applied(
    swap: SwapCoordinator, policy: TrainedPolicy, tmp_path: Path
) -> None:
    policy.step()
    policy.stage(tmp_path / "staged", policy.words)
    wrong = ref(policy, 1)
    with pytest.raises(CorruptError, match=r"builds on state .* the live state is"):
        await swap.prepare(tmp_path / "staged", ref(policy, 2), base=wrong)


async def test_a_rank_that_fails_to_commit_leaves_the_old_version_on_all(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> None:
    before = TrainedPolicy(SCHEMA, policy.words)
    old = swap.live
    await next_version(swap, policy, tmp_path, 1)
    engine.ranks.fail["activate"] = len(engine.ranks.words) - 1
    with pytest.raises(UnavailableError, match="rank"):
        await swap.activate()
    assert_holds(engine.ranks, before)
    assert (swap.live, swap.num_undone, swap.failed) == (old, 1, "")
    assert await swap.audit()


async def test_an_undo_that_fails_ends_the_engine(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> None:
    await next_version(swap, policy, tmp_path, 1)
    engine.ranks.fail |= {"activate": 0, "undo": 0}
    with pytest.raises(UnavailableError):
        await swap.activate()
    assert "could not be undone" in engine.failed
    assert not engine.is_thawed


async def test_live_words_that_changed_behind_our_back_are_noticed_and_end_the_engine(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> None:
    await next_version(swap, policy, tmp_path, 1)
    engine.ranks.words[0]["a.q_proj.weight"] ^= 0x4000
    with pytest.raises(UnavailableError):
        await swap.activate()
    assert "could not be undone" in engine.failed


async def test_an_audit_notices_one_flipped_bit(
    swap: SwapCoordinator, engine: MemoryEngine
) -> None:
    assert await swap.audit()
    engine.ranks.words[-1]["b.o_proj.weight"][3] ^= 1
    assert not await swap.audit()
    assert "live words" in engine.failed


async def test_going_back_one_version_restores_every_word_and_drops_the_cache(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> None:
    before, old = TrainedPolicy(SCHEMA, policy.words), swap.live
    await next_version(swap, policy, tmp_path, 1)
    await swap.activate()
    await swap.restore()
    assert_holds(engine.ranks, before)
    assert (swap.live, engine.dropped_caches) == (old, 1)
    assert await swap.audit()
    with pytest.raises(RuntimeError, match="no older version can be restored"):
        await swap.restore()


async def test_the_same_words_under_a_new_name_are_not_written(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy
) -> None:
    renamed = ref(policy, 3, epoch=2)
    engine.ranks.calls.clear()
    await swap.relabel(renamed)
    assert (swap.live, engine.live, engine.ranks.calls) == (renamed, renamed.version, [])
    policy.step()
    with pytest.raises(ValueError, match="other weights"):
        await swap.relabel(ref(policy, 4, epoch=2))


async def test_a_complete_version_too_large_to_undo_is_exact_too(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> None:
    policy.step(0.9)
    policy.stage(tmp_path / "staged", None)
    target = ref(policy, 7)
    held = await swap.prepare(tmp_path / "staged", target, base=None, keep_old=False)
    await swap.activate()
    assert_holds(engine.ranks, policy)
    assert (held, swap.undo_stack.newest) == (0, None)


async def test_another_schema_is_refused_while_something_is_served(swap: SwapCoordinator) -> None:
    other = Schema(grid=1, tensors=SCHEMA.tensors)
    with pytest.raises(UnavailableError, match="restart"):
        await swap.build_map(other)


async def test_a_caller_that_is_cancelled_leaves_no_half_swap(
    swap: SwapCoordinator, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> None:
    target = await next_version(swap, policy, tmp_path, 1)
    commit = asyncio.create_task(swap.activate(), name="activate")
    await asyncio.sleep(0)
    commit.cancel()
    while swap.live != target:  # noqa: ASYNC110 - the swap tells only its caller, who is gone
        await asyncio.sleep(0)
    assert_holds(engine.ranks, policy)


class UnevenRanks(MemoryRanks):
    """The first rank is prepared long before the second one."""

    @override
    async def call(self, method: str, *args: object) -> Sequence[Any]:
        if method != "poll_prepared" or self.calls[-1] == "poll_prepared":
            return await super().call(method, *args)
        self.calls.append(method)
        while (answer := self._ranks[0].poll_prepared()) is None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
        return [answer, None]


async def test_ranks_that_are_prepared_one_after_the_other_swap_together(
    policy: TrainedPolicy, info: EngineInfo, tmp_path: Path
) -> None:
    engine = MemoryEngine(info, UnevenRanks(2))
    await engine.swap.build_map(SCHEMA)
    policy.stage(tmp_path / "first", None)
    async with asyncio.timeout(30):
        await engine.swap.prepare(tmp_path / "first", ref(policy, 0), base=None)
        await engine.swap.activate()
    assert_holds(engine.ranks, policy)
