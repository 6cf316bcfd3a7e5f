"""Receipts become manifests, each on the last; what goes wrong between leaves no version."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import FencedError, StoreError, WrongStateError
from etude.common.store_retry import StoreRetry
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import (
    PayloadObject,
    Stats,
    VersionRef,
    WeightManifest,
    read_manifest,
)
from etude.common.weights.protocol.quarantine import quarantine
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.trainer.controller.publishing.versions import BaseLostError, VersionChain
from etude.trainer.controller.run import Run
from etude.trainer.export.receipts import PublishBase, RankReceipt, build_manifest

MakeWorld = Callable[..., Any]

NOTHING = "0" * 32
STATS = Stats(
    changed=1, elements=10, one_ulp=0, nonfinite=0, codecs={"L1": 2, "DENSE": 1}, num_bytes=100
)
lanes = st.integers(0, 2**64 - 1)
digests = st.builds(Digest, lanes, lanes)


def receipt(rank: int, change: Digest, share: Digest, **fields: Any) -> RankReceipt:
    given: dict[str, Any] = {
        "rank": rank,
        "payload": PayloadObject(
            rank=rank,
            key=f"weights/deltas/000001/{3:012d}/r{rank:04d}-{'a' * 16}.dlt",
            size=100,
            index_offset=10,
            index_length=20,
            index_sha256="b" * 64,
        ),
        "is_complete": False,
        "schema_sha256": "c" * 64,
        "change": change.hex(),
        "share": share.hex(),
        "coverage": ZERO.hex(),
        "stats": STATS,
    }
    return RankReceipt(**{**given, **fields})


def ref(state: Digest) -> VersionRef:
    return VersionRef(epoch=1, number=2, manifest_sha256="d" * 64, state=state.hex())


def manifest(receipts: list[RankReceipt], base: VersionRef | None) -> WeightManifest:
    return build_manifest(
        receipts, run="uid", version=VersionId(1, 3), step=7, holder="test", base=base
    )


@given(parts=st.lists(st.tuples(digests, digests), min_size=1, max_size=4))
def test_the_state_is_that_of_the_base_and_the_changes_of_all_ranks(
    parts: list[tuple[Digest, Digest]],
) -> None:
    before = [share.minus(change) for change, share in parts]
    base = Digest(sum(d.a for d in before) % 2**64, sum(d.b for d in before) % 2**64)
    found = manifest([receipt(i, *part) for i, part in enumerate(parts)], ref(base))
    shares = [share for _, share in parts]
    assert Digest.parse(found.state) == (
        sum(d.a for d in shares) % 2**64,
        sum(d.b for d in shares) % 2**64,
    )
    assert found.base == ref(base)
    assert found.stats.changed == len(parts)
    assert found.stats.codecs == {"DENSE": len(parts), "L1": 2 * len(parts)}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"schema_sha256": "e" * 64}, "rank 1 disagrees with rank 0"),
        ({"is_complete": True}, "rank 1 disagrees with rank 0"),
        ({"rank": 2}, r"receipts of \[0, 2\]"),
        ({"share": Digest(5, 6).hex()}, "the changes lead to state"),
        ({"coverage": Digest(5, 6).hex()}, "parts overlap, or some are missing"),
    ],
)
def test_receipts_that_do_not_fit_together_make_no_version(
    changed: dict[str, Any], what: str
) -> None:
    change, share = Digest(1, 1), Digest(2, 2)
    good = [receipt(0, change, share), receipt(1, change, share)]
    manifest(good, ref(Digest(2, 2)))
    with pytest.raises(WrongStateError, match=what):
        manifest([good[0], good[1].model_copy(update=changed)], ref(Digest(2, 2)))


def test_changes_without_a_base_make_no_version() -> None:
    with pytest.raises(WrongStateError, match="without a base"):
        manifest([receipt(0, Digest(1, 1), Digest(1, 1))], None)


def test_a_receipt_has_at_most_a_kilobyte() -> None:
    most = receipt(9_999, Digest(2**64 - 1, 2**64 - 1), Digest(2**64 - 1, 2**64 - 1))
    stats = Stats(
        **dict.fromkeys(("changed", "elements", "one_ulp", "nonfinite", "num_bytes"), 1 << 56),
        codecs=dict.fromkeys(("DENSE", "L1", "L2", "L2R"), 1 << 56),
    )
    assert len(most.model_copy(update={"stats": stats}).model_dump_json()) <= 1024


class Store(MemoryStore):
    """Fails on demand, before or after a call took effect."""

    lost_creates: int = 0
    """Manifests whose create takes effect without an answer."""
    lost_puts: int = 0

    @override
    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        if "manifests" in key and self.lost_creates:
            self.lost_creates -= 1
            raise StoreError("the answer was lost")

    @override
    def put(self, key: str, data: Any) -> None:
        super().put(key, data)
        if self.lost_puts:
            self.lost_puts -= 1
            raise StoreError("the answer was lost")


@dataclass
class Trainer:
    """A learner and the controller's half of publishing."""

    store: Store
    learners: SimulatedLearners
    versions: VersionChain
    number: int = 0

    async def step(self) -> None:
        await self.learners.supervised_step(self.number)

    async def publish(self, epoch: int = 1) -> WeightManifest:
        found = await self.encode(epoch)
        await self.commit(found)
        return found

    async def encode(self, epoch: int = 1) -> WeightManifest:
        found = await self.versions.encode(
            self.learners,
            VersionId(epoch, self.number),
            step=1,
            store_retry=StoreRetry(limit_s=1.0),
        )
        self.number += 1
        return found

    async def commit(self, found: WeightManifest) -> None:
        await self.versions.upload_and_publish(
            self.learners, found, store_retry=StoreRetry(limit_s=1.0)
        )


@pytest.fixture
def trainer() -> Trainer:
    store = Store()
    weights.claim_epoch(store, holder="test", parent=None, reason="start")
    versions = VersionChain(store=store, run_uid="run", holder="test")
    return Trainer(store, SimulatedLearners(store), versions)


async def test_each_version_builds_on_the_one_before(trainer: Trainer) -> None:
    first = await trainer.publish()
    await trainer.step()
    second = await trainer.publish()
    assert first.is_complete
    assert second.base == first.ref
    assert 0 < second.stats.changed <= 32
    assert read_manifest(trainer.store, VersionId(1, 1)) == second


async def test_lost_answers_of_the_store_change_nothing(trainer: Trainer) -> None:
    await trainer.publish()
    await trainer.step()
    trainer.store.lost_creates = trainer.store.lost_puts = 1
    found = await trainer.publish()
    assert read_manifest(trainer.store, VersionId(1, 1)) == found
    payloads = [i.key for i in trainer.store.list("weights/deltas/000001/000000000001/")]
    assert payloads == [item.key for item in found.objects]


async def test_a_payload_that_the_store_lost_is_never_named(trainer: Trainer) -> None:
    await trainer.publish()
    await trainer.step()
    base = trainer.versions.base
    [lost] = await trainer.learners.encode(VersionId(1, 1), base)
    assert lost.payload is not None
    await trainer.learners.upload(VersionId(1, 1))
    trainer.store.delete([lost.payload.key])
    promised = build_manifest(
        [lost],
        run="run",
        version=VersionId(1, 1),
        step=1,
        holder="test",
        base=None if base is None else base.ref,
    )
    with pytest.raises(StoreError, match="has no bytes instead of"):
        publication.publish_manifest(trainer.store, promised)


async def test_a_controller_that_was_replaced_publishes_nothing(trainer: Trainer) -> None:
    await trainer.publish()
    await trainer.step()
    weights.claim_epoch(trainer.store, holder="other", parent=VersionId(1, 0), reason="takeover")
    with pytest.raises(FencedError):
        await trainer.publish()
    assert weights.newest_version(trainer.store) == VersionId(1, 0)


async def test_a_base_that_is_refused_is_not_built_upon(trainer: Trainer) -> None:
    await trainer.publish()
    await trainer.step()
    await trainer.publish()
    quarantine(trainer.store, VersionId(1, 1), reason="test")
    await trainer.step()
    with pytest.raises(BaseLostError, match=r"base 1\.1 is quarantined"):
        await trainer.publish()
    assert weights.newest_version(trainer.store) == VersionId(1, 1)


async def test_versions_are_encoded_on_those_that_are_on_their_way(trainer: Trainer) -> None:
    found = []
    for _ in range(3):
        found.append(await trainer.encode())
        await trainer.step()
    assert list(trainer.store.list("weights/deltas/")) == []
    for manifest in found:
        await trainer.commit(manifest)
    assert weights.accepted_chain(trainer.store) == [m.version for m in found]
    assert [m.base for m in found] == [None, found[0].ref, found[1].ref]
    assert [read_manifest(trainer.store, m.version) for m in found] == found


@pytest.mark.parametrize("damage", ["none", "missing", "damaged"])
async def test_a_new_controller_goes_on_from_the_version_of_its_checkpoint(
    trainer: Trainer, damage: str
) -> None:
    first = await trainer.publish()
    await trainer.learners.copy_state("checkpoint/")
    await trainer.learners.save("checkpoint/")
    weights.claim_epoch(trainer.store, holder="other", parent=VersionId(1, 0), reason="takeover")
    key = VersionId(1, 0).manifest_key
    if damage == "missing":
        trainer.store.delete([key])
    elif damage == "damaged":
        trainer.store.put(key, b"{}")
    learners = SimulatedLearners(trainer.store)
    await learners.restore("checkpoint/")
    versions = VersionChain(store=trainer.store, run_uid="run", holder="test")
    await versions.resume(VersionId(1, 0))
    assert (versions.base == PublishBase(first.ref, first.schema_sha256)) == (damage == "none")
    again = Trainer(trainer.store, learners, versions, number=1)
    await again.step()
    assert (await again.publish(epoch=2)).is_complete == (damage != "none")


def published(run: Run) -> list[WeightManifest]:
    return [read_manifest(run.store, v) for v in weights.accepted_chain(run.store)]


async def test_the_versions_of_a_run_are_a_chain_of_deltas(make_world: MakeWorld) -> None:
    world = make_world()
    assert await world.train()
    chain = published(world.runs[-1])
    assert [m.base for m in chain[1:]] == [m.ref for m in chain[:-1]]
    rows = world.rows("version")
    assert {row["complete"] for row in rows[1:]} == {False}
    assert all(0 < row["density"] < 1 and row["bits_per_change"] > 0 for row in rows[1:])


async def test_a_run_that_died_goes_on_from_the_version_of_its_checkpoint(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world(every_steps=1)

    await world.crash(after=7)
    assert await world.train()
    assert world.digest == uninterrupted
    chain = published(world.runs[-1])
    first = next(m for m in chain if m.epoch == 2)
    assert first.base is not None
    assert first.base.epoch == 1
