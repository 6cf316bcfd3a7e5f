"""A copy on disk: bit for bit a published version, whatever was in the way."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore, MissingError
from etude.common.errors import CorruptError
from etude.common.weights import VersionId
from etude.common.weights.replicas.mirror import Mirror
from etude.common.weights.tensors.schema import Schema, TensorSpec

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="experts", dtype="BF16", shape=(2, 64, 33), split="rows"),
        TensorSpec(name="none", dtype="F32", shape=(0, 7), split="rows"),
        TensorSpec(name="norm", dtype="F32", shape=(65,), split="rows"),
        TensorSpec(name="o_proj.weight", dtype="BF16", shape=(300, 1024), split="columns"),
    ),
)


FIRST, SECOND = VersionId(1, 0), VersionId(1, 1)


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    weights.claim_epoch(made, holder="t", parent=None, reason="start")
    return made


@pytest.fixture
def policy(store: MemoryStore) -> TrainedPolicy:
    """One complete version of it is published."""
    made = TrainedPolicy(SCHEMA)
    made.publish(store, 0, complete=True)
    return made


def is_copy(mirror: Mirror, policy: TrainedPolicy) -> bool:
    same = (
        np.array_equal(mirror.tensor_words[name], words) for name, words in policy.words.items()
    )
    return all(same) and mirror.tensor_words.keys() == policy.words.keys()


def test_a_copy_follows_the_chain_bit_for_bit(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> None:
    mirror = Mirror(store, tmp_path / "m", run="uid-run")
    for number in range(1, 4):
        policy.step()
        manifest = policy.publish(store, number)
        mirror.move_to(manifest.version)
        assert mirror.ref == manifest.ref
        assert mirror.scan().hex() == manifest.state
        assert is_copy(mirror, policy)


def test_a_copy_is_found_again_by_the_next_process(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> None:
    Mirror(store, tmp_path / "m").move_to(FIRST)
    again = Mirror(store, tmp_path / "m")
    assert again.ref is not None
    assert again.ref.version == FIRST
    assert again.move_to(FIRST) == []
    assert is_copy(again, policy)


def test_a_copy_that_was_damaged_on_disk_starts_afresh(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> None:
    Mirror(store, tmp_path / "m").move_to(FIRST)
    data = bytearray((tmp_path / "m" / "words").read_bytes())
    data[1000] ^= 1
    (tmp_path / "m" / "words").write_bytes(data)
    again = Mirror(store, tmp_path / "m")
    assert again.ref is None
    assert [edge.kind for edge in again.move_to(FIRST)] == ["complete"]
    assert is_copy(again, policy)


def test_a_process_killed_half_way_leaves_no_half_version(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> None:
    mirror = Mirror(store, tmp_path / "m")
    mirror.move_to(FIRST)
    policy.step()
    policy.publish(store, 1)

    def killed(*_: object) -> None:
        mirror._drop_label()
        mirror.tensor_words["norm"][:10] = 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mirror.move_to(SECOND, killed)
    again = Mirror(store, tmp_path / "m")
    assert again.ref is None
    again.move_to(SECOND)
    assert is_copy(again, policy)


@pytest.mark.usefixtures("policy")
def test_a_version_of_another_run_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    mirror = Mirror(store, tmp_path / "m", run="run-2")
    with pytest.raises(CorruptError, match="of run uid-run, not run-2"):
        mirror.move_to(FIRST)
    assert mirror.ref is None


@pytest.mark.usefixtures("policy")
def test_a_new_schema_replaces_the_old_words(store: MemoryStore, tmp_path: Path) -> None:
    mirror = Mirror(store, tmp_path / "m")
    mirror.move_to(FIRST)
    wider = SCHEMA.tensors[2].model_copy(update={"shape": (70,)})
    other = TrainedPolicy(Schema(grid=2, tensors=(*SCHEMA.tensors[:2], wider)), seed=5)
    other.publish(store, 1, complete=True)
    mirror.move_to(SECOND)
    assert is_copy(mirror, other)


def test_a_roll_back_leads_to_what_counts_now(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> None:
    mirror = Mirror(store, tmp_path / "m")
    base = policy.base
    assert base is not None
    policy.step()
    policy.publish(store, 1)
    mirror.move_to(SECOND)
    weights.claim_epoch(store, holder="t", parent=FIRST, reason="rollback")
    policy.resume(base)
    policy.step(0.5)
    manifest = policy.publish(store, 2, epoch=2)
    mirror.move_to(VersionId(2, 2))
    assert is_copy(mirror, policy)
    assert mirror.scan().hex() == manifest.state


def test_a_missing_payload_leaves_what_was_there(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> None:
    mirror = Mirror(store, tmp_path / "m")
    mirror.move_to(FIRST)
    before = {name: words.copy() for name, words in mirror.tensor_words.items()}
    policy.step()
    store.delete([policy.publish(store, 1).objects[0].key])
    with pytest.raises(MissingError):
        mirror.move_to(SECOND)
    assert mirror.ref is not None
    assert mirror.ref.version == FIRST
    assert all(np.array_equal(mirror.tensor_words[name], words) for name, words in before.items())
