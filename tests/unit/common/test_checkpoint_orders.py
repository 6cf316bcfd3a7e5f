"""A checkpoint is complete and verified, or it is not there."""

import json

import pytest

from etude.common.blobs import MemoryStore, MissingError
from etude.common.checkpoints import manifest
from etude.common.checkpoints.job import VARIABLE, order_from_env
from etude.common.checkpoints.manifest import CheckpointId, CheckpointManifest
from etude.common.errors import CorruptError

RUN = "run-uid"


def write(store: MemoryStore, step: int) -> manifest.StoredCheckpoint:
    prefix = CheckpointId(0, step).prefix
    for key in ("learner/weights.bin", "controller.json"):
        store.put(prefix + key, f"{key} at {step}".encode() * 50)
    return manifest.write_manifest(
        store,
        CheckpointManifest(
            run=RUN,
            step=step,
            phase="rl",
            phase_step=step,
            epoch=1,
            policy_version=step,
            reason="Scheduled",
            objects=[
                manifest.describe_object(store, prefix, key)
                for key in ("learner/weights.bin", "controller.json")
            ],
        ),
    )


def newest(store: MemoryStore, problems: list[str]) -> manifest.StoredCheckpoint | None:
    candidates = list(reversed(manifest.list_checkpoints(store)))
    return manifest.first_intact(store, candidates, run=RUN, problems=problems)


def test_the_newest_checkpoint_is_found_and_reads_back() -> None:
    store = MemoryStore()
    write(store, 10)
    last = write(store, 20)
    assert newest(store, []) == last
    assert last.manifest.size_bytes > 0


def test_without_a_manifest_there_is_no_checkpoint() -> None:
    store = MemoryStore()
    store.put("checkpoints/000000000010/learner/weights.bin", b"half of it")
    assert newest(store, []) is None
    with pytest.raises(MissingError):
        manifest.read_checkpoint(store, CheckpointId(0, 10))


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "torn manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_named(harm: str) -> None:
    store = MemoryStore()
    older = write(store, 10)
    write(store, 20)
    key = "checkpoints/000000000020/learner/weights.bin"
    match harm:
        case "flip":
            store.objects[key] = b"X" + store.objects[key][1:]
        case "truncate":
            store.objects[key] = store.objects[key][:-1]
        case "delete":
            del store.objects[key]
        case _:
            store.objects["checkpoints/000000000020/manifest.json"] = b'{"format": 1'
    problems: list[str] = []
    assert newest(store, problems) == older
    assert len(problems) == 1
    assert "000000000020" in problems[0]


def test_another_runs_checkpoint_is_not_mistaken_for_ours() -> None:
    store = MemoryStore()
    write(store, 10)
    with pytest.raises(CorruptError, match="of run run-uid"):
        manifest.read_checkpoint(store, CheckpointId(0, 10), run="other")


def test_an_order_of_a_later_operator_is_understood() -> None:
    told = {"action": "verify", "uri": "s3://runs/demo", "digest": "d", "ofTheFuture": 1}
    storage = {"uri": "s3://runs/demo", "ofTheFuture": 1}
    order = order_from_env({VARIABLE: json.dumps({**told, "storage": storage})})
    assert (order.action, order.storage.uri) == ("verify", "s3://runs/demo")
