"""Going back without the store, and what is too large for it."""

import logging
from pathlib import Path

import pytest
from tests.support.weights.publishing import TrainedPolicy

from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, UnavailableError
from etude.common.weights import Edge, VersionRef
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.swap.coordinator import SwapCoordinator
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Prefetcher
from etude.inference.updates.update_steps import UpdateStep
from etude.inference.worker import pending_change as changes

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="a.weight", dtype="BF16", shape=(8, 6), split="rows"),
        TensorSpec(name="b.bias", dtype="F32", shape=(5,), split="rows"),
    ),
)


class Chain:
    """An engine that follows a policy, each version staged by hand."""

    def __init__(self, engine: MemoryEngine, folder: Path) -> None:
        self.engine, self.path = engine, folder / "staged"
        self.policy = TrainedPolicy(SCHEMA)
        self.refs: list[VersionRef] = []

    @property
    def swap(self) -> SwapCoordinator:
        return self.engine.swap

    async def start(self) -> None:
        await self.swap.build_map(SCHEMA)
        self.policy.stage(self.path, None)
        await self.swap.prepare(self.path, self.ref(), base=None, keep_old=False)
        await self.swap.activate()

    def ref(self, *, epoch: int = 1) -> VersionRef:
        number = len(self.refs)
        found = VersionRef(
            epoch=epoch,
            number=number,
            manifest_sha256=f"{number:064x}",
            state=self.policy.state().hex(),
        )
        self.refs.append(found)
        return found

    async def prepare(self) -> int:
        old = {name: words.copy() for name, words in self.policy.words.items()}
        self.policy.step(0.5)
        self.policy.stage(self.path, old)
        return await self.swap.prepare(self.path, self.ref(), base=self.swap.live)

    async def step(self) -> int:
        held = await self.prepare()
        await self.swap.activate()
        return held


@pytest.fixture(params=[1, 2])
async def chain(request: pytest.FixtureRequest, info: EngineInfo, tmp_path: Path) -> Chain:
    found = Chain(MemoryEngine(info, MemoryRanks(request.param)), tmp_path)
    found.swap.max_undo = 3
    await found.start()
    return found


async def test_as_many_versions_are_taken_back_as_are_kept(chain: Chain) -> None:
    held = [await chain.step() for _ in range(5)]
    assert (chain.swap.undo_stack.depth, chain.swap.undo_stack.num_bytes) == (3, sum(held[2:]))
    for number in (4, 3, 2):
        await chain.swap.restore()
        assert chain.swap.live == chain.refs[number]
        assert (await chain.swap.scan()).hex() == chain.refs[number].state
    with pytest.raises(RuntimeError, match="no older version can be restored"):
        await chain.swap.restore()


async def test_several_versions_are_taken_back_in_one_pause(chain: Chain) -> None:
    for _ in range(4):
        await chain.step()
    labels = len(chain.engine.activated)
    await chain.swap.restore(chain.refs[2])
    assert (chain.swap.live, len(chain.engine.activated)) == (chain.refs[2], labels + 1)
    assert await chain.swap.audit()
    assert chain.swap.undo_stack.depth == 1


async def test_words_that_are_held_serve_under_the_name_that_a_new_epoch_gives_them(
    chain: Chain,
) -> None:
    for _ in range(3):
        await chain.step()
    renamed = chain.refs[1].model_copy(update={"epoch": 2, "number": 9})
    await chain.swap.restore(renamed)
    assert chain.swap.live == renamed
    assert await chain.swap.audit()


async def test_what_was_prepared_and_refused_does_not_stand_between_older_versions(
    chain: Chain,
) -> None:
    for _ in range(2):
        await chain.step()
    await chain.prepare()
    await chain.swap.restore(chain.refs[1])
    assert (await chain.swap.scan()).hex() == chain.refs[1].state
    assert await chain.swap.audit()


async def test_a_half_commit_is_undone_and_older_versions_stay_in_reach(chain: Chain) -> None:
    for _ in range(2):
        await chain.step()
    await chain.prepare()
    chain.engine.ranks.fail["activate"] = 0
    with pytest.raises(UnavailableError, match="rank 0"):
        await chain.swap.activate()
    assert await chain.swap.audit()
    await chain.swap.restore(chain.refs[1])
    assert (await chain.swap.scan()).hex() == chain.refs[1].state


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "FREE_BYTES", 0)


@pytest.mark.usefixtures("small_memory")
async def test_a_version_above_the_limit_is_written_piece_by_piece_and_says_its_size(
    chain: Chain, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert await chain.step() == 0
    assert "needs up to" in caplog.text
    assert (chain.swap.live, chain.swap.undo_stack.newest) == (chain.refs[1], None)
    assert await chain.swap.audit()


@pytest.mark.usefixtures("small_memory")
async def test_a_version_above_the_limit_that_fails_half_way_ends_the_engine_and_says_why(
    chain: Chain,
) -> None:
    await chain.prepare()
    chain.engine.ranks.fail["activate"] = 0
    with pytest.raises(UnavailableError):
        await chain.swap.activate()
    assert "too large to keep the old words" in chain.engine.failed
    assert not chain.engine.is_thawed


async def test_a_full_disk_leaves_the_live_version_serving_and_says_what_is_needed(
    receiver: VersionFollower, engine: MemoryEngine, store: MemoryStore
) -> None:
    policy = TrainedPolicy(SCHEMA)
    policy.publish(store, 0, complete=True)
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 1)
    part = receiver.stager.scratch / "staged" / "1-1.partial"
    part.parent.mkdir(exist_ok=True)
    part.symlink_to("/dev/full")
    with pytest.raises(UnavailableError, match=r"1\.1: it needs about \d+ MiB in .*No space left"):
        await receiver.catch_up()
    assert str(engine.live) == "1.0"
    assert not part.is_symlink()
    await receiver.catch_up()
    assert str(engine.live) == "1.1"


def leg(number: int) -> UpdateStep:
    target = VersionRef(epoch=1, number=number, manifest_sha256="0" * 64, state="0" * 32)
    edge = Edge("delta", None, target, "0" * 64, ())
    return UpdateStep(edge, (edge,))


async def test_two_versions_are_staged_ahead_and_no_more(tmp_path: Path) -> None:
    begun: list[int] = []

    def stage(each: UpdateStep) -> Path:
        begun.append(each.edge.target.number)
        return tmp_path / str(each.edge.target.number)

    ahead = Prefetcher()
    with ahead.prefetching([leg(number) for number in range(6)]):
        assert await ahead.wait_staged(0, stage) == tmp_path / "0"
        assert [version.number for version in ahead.pending_versions()] == [1, 2]
        assert await ahead.wait_staged(2, stage) == tmp_path / "2"
        assert [version.number for version in ahead.pending_versions()] == [3, 4]
        assert await ahead.wait_staged(4, stage) == tmp_path / "4"
    assert begun[:5] == [0, 1, 2, 3, 4]
    assert ahead.pending_versions() == []


async def test_a_version_that_cannot_be_staged_ahead_fails_in_its_own_turn(tmp_path: Path) -> None:
    def stage(each: UpdateStep) -> Path:
        if each.edge.target.number == 1:
            raise CorruptError("version 1.1 is damaged")
        return tmp_path

    ahead = Prefetcher()
    with ahead.prefetching([leg(0), leg(1)]):
        await ahead.wait_staged(0, stage)
        with pytest.raises(CorruptError, match=r"1\.1 is damaged"):
            await ahead.wait_staged(1, stage)


async def test_a_replica_that_is_behind_leaves_nothing_staged_once_it_has_caught_up(
    receiver: VersionFollower, engine: MemoryEngine, store: MemoryStore
) -> None:
    policy = TrainedPolicy(SCHEMA)
    policy.publish(store, 0, complete=True)
    await receiver.catch_up()
    for number in range(1, 5):
        policy.step(0.05)
        policy.publish(store, number)
    await receiver.catch_up()
    assert str(engine.live) == "1.4"
    assert not list((receiver.stager.scratch / "staged").iterdir())
