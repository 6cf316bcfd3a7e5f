"""Checkpoints: registered, verified, retired, deleted with their data."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from etude.common.api.kinds import Checkpoint
from etude.operator.checkpoints import decide, job_slots
from etude.operator.controller.rejections import PROBLEM_RETRY_S
from etude.operator.kube.interface import ApiRejectedError
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Ref
from etude.operator.remotes.clients import MemoryRemoteClient
from etude.operator.remotes.report_store import ReportPosition
from etude.v1 import run_pb2


@pytest.fixture
async def running(lab: Any, run_body: Any) -> Any:
    lab.cluster.upsert(run_body(checkpointing={"keepLast": 2}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    return lab


def name(step: int) -> str:
    return f"demo-s{step:08d}-000000"


def checkpoint(lab: Any, step: int) -> Checkpoint:
    found = next(
        m
        for key, m in lab.cluster.objects().items()
        if key.kind == "Checkpoint" and m["spec"].get("step", 0) == step
    )
    return Checkpoint.model_validate(found)


def steps(lab: Any) -> list[int]:
    found = [m for key, m in lab.cluster.objects().items() if key.kind == "Checkpoint"]
    return sorted(m["spec"].get("step", 0) for m in found)


async def test_what_the_controller_announces_is_registered_and_verified(running: Any) -> None:
    await running.tell_checkpoint(10)
    made = checkpoint(running, 10)
    assert made.metadata.name == name(10)
    assert made.metadata.finalizers == ("etude.dev/checkpoint-data",)
    assert made.status.phase == "Verifying"
    assert [job.endswith("-ver") for job in running.names("Job")] == [True]
    await running.finish_jobs()
    assert checkpoint(running, 10).status.phase == "Ready"
    assert running.names("Job") == []
    await running.advance(5)
    assert running.run().status.last_checkpoint.step == 10
    assert running.condition("CheckpointHealthy") == ("True", "CheckpointVerified")


async def test_of_many_checkpoints_a_few_are_read_back_at_a_time(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(checkpointing={"keepLast": 20}))
    await lab.settle()
    for step in range(10, 130, 10):
        await lab.tell_checkpoint(step)
    most = 0
    for _ in range(12):
        most = max(most, len(lab.names("Job")))
        await lab.finish_jobs()
        await lab.advance(decide.SLOT_POLL_S)
    assert most == job_slots.MAX_JOBS
    assert {checkpoint(lab, step).status.phase for step in range(10, 130, 10)} == {"Ready"}


async def test_a_checkpoint_shows_the_version_that_its_chain_begins_with(running: Any) -> None:
    await running.tell_checkpoint(10)
    assert checkpoint(running, 10).spec.keyframe is None
    record = run_pb2.CheckpointRecord(
        step=20,
        reason="Scheduled",
        uri="s3://runs/demo/20",
        manifest_digest=f"{20:064x}",
        policy_version=17,
        keyframe=0,
    )
    await running.tell(record)
    made = checkpoint(running, 20)
    assert (made.spec.policy_version, made.spec.keyframe) == (17, 0)


async def test_announcing_it_again_registers_nothing(running: Any) -> None:
    await running.tell_checkpoint(10)
    before = len([w for w in running.writes if "Checkpoint" in w])
    running.new_controller()
    await running.kill()
    await running.tell_checkpoint(10)
    assert len([w for w in running.writes if "Checkpoint" in w]) == before


async def test_a_restarted_operator_asks_only_for_what_is_new(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await running.tell_checkpoint(10)
    await running.tell_event("PhaseStarted")
    await running.advance(10)
    reported = running.run().status.reported
    assert (reported.epoch, reported.sequence) == (1, 3)
    asked: list[ReportPosition] = []
    watch_run = running.peers.watch_run

    def watched(self: MemoryRemoteClient, target: str, after: ReportPosition) -> Any:
        asked.append(after)
        return watch_run(target, after)

    monkeypatch.setattr(MemoryRemoteClient, "watch_run", watched)
    await running.kill()
    await running.settle()
    assert asked == [ReportPosition(1, 3)]
    assert running.book.run(running.run().metadata.uid).pending == []


async def test_data_that_outlived_its_checkpoint_is_not_deleted_later(running: Any) -> None:
    for step in (10, 20):
        await running.tell_checkpoint(step)
        await running.finish_jobs()
    await running.advance(5)
    key = Ref("Checkpoint", "lab", name(10))
    manifest = running.cluster.objects()[key]
    kept = {**manifest["spec"], "deletionPolicy": "Retain"}
    running.cluster.upsert({**manifest, "spec": kept})
    await running.settle()
    running.cluster.remove(key)
    await running.settle()
    assert steps(running) == [20]
    running.epoch += 1  # a new controller tells of all that lies in the store
    for step in (10, 20, 30, 40):
        await running.tell_checkpoint(step)
        await running.finish_jobs()
    await running.finish_jobs()
    assert steps(running) == [10, 30, 40]
    assert checkpoint(running, 10).spec.deletion_policy == "Retain"
    assert checkpoint(running, 10).metadata.finalizers == ()
    assert checkpoint(running, 30).spec.deletion_policy == "Delete"


async def test_steps_that_are_repeated_after_a_fall_back_are_kept_like_any(running: Any) -> None:
    for step in (10, 20):
        await running.tell_checkpoint(step)
        await running.finish_jobs()
    running.epoch += 1
    for step in (10, 20):
        await running.tell_checkpoint(step)
    await running.tell_event("Resumed")
    await running.tell_checkpoint(15)
    assert checkpoint(running, 15).spec.deletion_policy == "Delete"


async def test_damaged_data_is_reported_and_not_resumed_from(running: Any) -> None:
    await running.tell_checkpoint(10)
    await running.finish_jobs()
    await running.tell_checkpoint(20)
    words = "learner/rank0: does not match the manifest"
    for _ in range(3):
        await running.finish_jobs(exit_code=65, message=words)
    damaged = checkpoint(running, 20)
    assert damaged.status.phase == "Corrupt"
    assert damaged.status.conditions[0].message == words
    assert running.condition("CheckpointHealthy") == ("False", "Corrupt")
    assert running.run().status.last_checkpoint.step == 10


async def test_a_store_that_is_down_is_asked_again_later(running: Any) -> None:
    await running.tell_checkpoint(10)
    for _ in range(3):
        await running.finish_jobs(exit_code=75, message="connection refused")
    made = checkpoint(running, 10)
    assert (made.status.phase, made.status.conditions[0].reason) == (
        "Verifying",
        "StorageUnavailable",
    )
    await running.advance(61)
    await running.finish_jobs()
    assert checkpoint(running, 10).status.phase == "Ready"


async def test_only_the_newest_verified_ones_are_kept(running: Any) -> None:
    for step in (10, 20, 30):
        await running.tell_checkpoint(step)
        await running.finish_jobs()
    assert steps(running) == [10, 20, 30]
    assert checkpoint(running, 10).status.phase == "Deleting"
    await running.finish_jobs()
    assert steps(running) == [20, 30]
    assert running.names("Job") == []


async def test_nothing_is_retired_before_the_newer_ones_are_verified(running: Any) -> None:
    await running.tell_checkpoint(10)
    await running.finish_jobs()
    for step in (20, 30, 40):
        await running.tell_checkpoint(step)
    assert steps(running) == [10, 20, 30, 40]
    assert checkpoint(running, 10).metadata.deletion_timestamp is None


async def test_a_pinned_checkpoint_stays(running: Any) -> None:
    await running.tell_checkpoint(10)
    key = Ref("Checkpoint", "lab", name(10))
    manifest = running.cluster.objects()[key]
    running.cluster.upsert({**manifest, "spec": {**manifest["spec"], "pinned": True}})
    for step in (20, 30, 40):
        await running.tell_checkpoint(step)
        await running.finish_jobs()
    await running.finish_jobs()
    assert steps(running) == [10, 30, 40]


async def test_a_failed_deletion_is_reported_and_tried_again(running: Any) -> None:
    await running.tell_checkpoint(10)
    await running.finish_jobs()
    running.cluster.remove(Ref("Checkpoint", "lab", name(10)))
    await running.settle()
    for _ in range(3):
        await running.finish_jobs(exit_code=75, message="connection refused")
    assert checkpoint(running, 10).status.conditions[0].reason == "DeletionFailed"
    await running.advance(61)
    await running.finish_jobs()
    assert steps(running) == []


async def test_a_retained_checkpoint_goes_without_its_data(lab: Any, run_body: Any) -> None:
    body = {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": "imported", "namespace": "lab"},
        "spec": {
            "reason": "Imported",
            "source": {"uri": "s3://old/one", "manifestDigest": "0" * 64},
            "storage": {"uri": "s3://old"},
            "deletionPolicy": "Retain",
        },
    }
    lab.cluster.upsert(body)
    await lab.settle()
    await lab.finish_jobs()
    assert checkpoint(lab, 0).status.phase == "Ready"
    lab.cluster.remove(Ref("Checkpoint", "lab", "imported"))
    await lab.settle()
    assert steps(lab) == []
    assert not [w for w in lab.writes if w.endswith("-del")]


async def test_deleting_the_run_deletes_the_data_of_its_checkpoints(running: Any) -> None:
    await running.tell_checkpoint(10)
    await running.finish_jobs()
    running.cluster.remove(Ref("RLRun", "lab", "demo"))
    await running.settle()
    assert [job.endswith("-del") for job in running.names("Job")] == [True]
    await running.finish_jobs()
    assert running.cluster.objects() == {}


async def test_an_import_under_an_old_name_is_verified_itself(lab: Any) -> None:
    def imported(digest: str) -> dict[str, Any]:
        return {
            "apiVersion": "etude.dev/v1alpha1",
            "kind": "Checkpoint",
            "metadata": {"name": "imported", "namespace": "lab"},
            "spec": {
                "reason": "Imported",
                "source": {"uri": "s3://old/one", "manifestDigest": digest * 64},
                "storage": {"uri": "s3://old"},
                "deletionPolicy": "Retain",
            },
        }

    lab.cluster.upsert(imported("0"))
    await lab.settle()
    (first,) = lab.names("Job")
    lab.cluster.remove(Ref("Checkpoint", "lab", "imported"))
    await lab.settle()
    lab.cluster.upsert(imported("1"))
    await lab.settle()
    assert len(lab.names("Job")) == 2
    lab.end(f"{first}-0", exit_code=65, message="is not what was registered", restarts=0)
    await lab.settle()
    assert checkpoint(lab, 0).status.phase == "Verifying"


async def test_a_store_that_stays_away_makes_checkpoints_unhealthy(running: Any) -> None:
    await running.tell_checkpoint(10)
    for _ in range(3):
        await running.finish_jobs(exit_code=75, message="connection refused")
    await running.advance(5)
    assert running.condition("CheckpointHealthy") == ("False", "StorageUnavailable")


@pytest.fixture
def without_room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A while during which a quota takes no Checkpoint."""
    apply = MemoryCluster.apply

    async def full(self: Any, manifest: Any, *, manager: str) -> Any:
        if manifest["kind"] == "Checkpoint":
            raise ApiRejectedError(f"{manifest['metadata']['name']}: exceeded quota")
        return await apply(self, manifest, manager=manager)

    @contextlib.contextmanager
    def lasting() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryCluster, "apply", full)
            yield

    return lasting


async def test_a_run_is_not_complete_before_its_last_checkpoint_is_an_object(
    running: Any, without_room: Any
) -> None:
    await running.tell_checkpoint(10)
    await running.finish_jobs()
    with without_room():
        await running.tell_checkpoint(40)
        await running.say(state=run_pb2.RUN_STATE_DONE, step=40)
        assert running.condition("Complete")[0] == "False"
    await running.advance(PROBLEM_RETRY_S)
    await running.finish_jobs()
    assert running.condition("Complete")[0] == "True"
    assert running.run().status.last_checkpoint.step == 40


async def test_a_final_checkpoint_that_is_never_taken_as_an_object_keeps_no_pods(
    running: Any, without_room: Any
) -> None:
    limit_s = running.run().spec.checkpointing.timeout_seconds
    with without_room():
        await running.tell_checkpoint(40)
        await running.say(state=run_pb2.RUN_STATE_DONE, step=40)
        await running.advance(limit_s / 2)
        assert running.condition("Complete")[0] == "False"
        await running.advance(limit_s)
        assert running.condition("Complete")[0] == "True"
        assert not running.pods("trainer")
    await running.advance(PROBLEM_RETRY_S)
    assert checkpoint(running, 40).spec.reason, "it is registered once there is room"
