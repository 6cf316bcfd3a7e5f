"""Deleting one checkpoint deletes its own objects only, also after an interrupted attempt."""

import hashlib

import pytest

from etude.common.api.run.checkpointing import Depth
from etude.common.blobs import MemoryStore
from etude.common.checkpoints import job
from etude.common.checkpoints import manifest as checkpoints_manifest
from etude.common.checkpoints.job import verify_checkpoint
from etude.common.checkpoints.manifest import CheckpointManifest
from etude.common.errors import CorruptError, StoreError
from etude.operator.checkpoints import data_job


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def written(store: MemoryStore, *keys: str, step: int = 7, epoch: int = 1) -> str:
    """A checkpoint with these objects; returns the digest of its manifest."""
    for key in keys:
        store.put(key, f"{key} of {epoch}".encode())
    manifest = CheckpointManifest(
        run="uid-run",
        step=step,
        phase="rl",
        phase_step=step,
        epoch=epoch,
        policy_version=1,
        reason="Scheduled",
        objects=[checkpoints_manifest.describe_object(store, "", key) for key in keys],
    )
    data = manifest.model_dump_json().encode()
    store.put(checkpoints_manifest.MANIFEST, data)
    return hashlib.sha256(data).hexdigest()


def test_only_what_the_manifest_names_is_deleted(store: MemoryStore) -> None:
    digest = written(store, "learner/0", "controller.json")
    store.put("checkpoints/000000000009/manifest.json", b"of another, below a mistyped prefix")
    data_job.delete(store, digest)
    assert set(store.objects) == {"checkpoints/000000000009/manifest.json"}
    data_job.delete(store, digest)


def test_a_prefix_that_holds_another_checkpoint_is_left_alone(store: MemoryStore) -> None:
    old = written(store, "learner/0")
    new = written(store, "learner/0", epoch=2)
    before = dict(store.objects)
    data_job.delete(store, old)
    assert store.objects == before
    data_job.delete(store, new)
    assert store.objects == {}


def test_a_deletion_that_broke_off_is_finished(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = written(store, "learner/0", "learner/1")
    delete, calls = store.delete, []

    def failing(self: MemoryStore, keys: list[str]) -> None:
        calls.append(keys)
        if len(calls) == 2:
            raise StoreError("connection reset")
        delete(keys)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "delete", failing)
        with pytest.raises(StoreError):
            data_job.delete(store, digest)
    assert checkpoints_manifest.MANIFEST not in store.objects
    assert "learner/1" in store.objects
    data_job.delete(store, digest)
    assert store.objects == {}


def test_a_deletion_that_broke_off_spares_what_was_written_since(store: MemoryStore) -> None:
    old = written(store, "learner/0", "learner/1")
    store.put(f"deleting-{old}.json", store.get(checkpoints_manifest.MANIFEST))
    new = written(store, "learner/0", epoch=2)
    data_job.delete(store, old)
    verify_checkpoint(store, new)
    assert set(store.objects) == {"learner/0", checkpoints_manifest.MANIFEST}


def test_a_manifest_that_cannot_be_read_is_reported(store: MemoryStore) -> None:
    store.put(checkpoints_manifest.MANIFEST, b"{}")
    with pytest.raises(CorruptError):
        data_job.delete(store, hashlib.sha256(b"{}").hexdigest())


def test_a_manifest_check_reads_no_object_and_misses_what_only_reading_shows(
    store: MemoryStore,
) -> None:
    digest = written(store, "learner/0", "controller.json")
    verify_checkpoint(store, digest, depth="Manifest")
    store.put("learner/0", b"x" * len(store.get("learner/0")))
    verify_checkpoint(store, digest, depth="Manifest")
    with pytest.raises(CorruptError, match="learner/0: does not match"):
        verify_checkpoint(store, digest)


def test_a_manifest_check_finds_what_is_missing_or_cut_short(store: MemoryStore) -> None:
    digest = written(store, "learner/0", "controller.json")
    store.put("learner/0", b"x")
    with pytest.raises(CorruptError, match="learner/0: has 1 bytes, not 14"):
        verify_checkpoint(store, digest, depth="Manifest")
    store.delete(["learner/0"])
    with pytest.raises(CorruptError, match="learner/0: is missing"):
        verify_checkpoint(store, digest, depth="Manifest")


@pytest.mark.parametrize("depth", ["Manifest", "Checksums"])
def test_a_manifest_that_was_written_anew_is_not_the_one_that_was_registered(
    store: MemoryStore, depth: Depth
) -> None:
    registered = written(store, "learner/0")
    verify_checkpoint(store, registered, depth=depth)
    written(store, "learner/0", epoch=2)
    with pytest.raises(CorruptError, match="has digest"):
        verify_checkpoint(store, registered, depth=depth)


def test_a_job_waits_for_its_store_and_gives_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter((StoreError("away"), StoreError("away")))

    def work() -> None:
        for error in left:
            raise error

    job.retry_store_errors(work)
    monkeypatch.setattr(job, "PATIENCE_S", 0.1)

    def fail() -> None:
        raise StoreError("still away")

    with pytest.raises(StoreError, match="still away"):
        job.retry_store_errors(fail)
