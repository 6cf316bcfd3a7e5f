"""On-demand checkpoints, and the final checkpoint of a run that fails."""

from typing import Any

import pytest

from etude.common.api.kinds import Checkpoint
from etude.operator.controller.status_writer import STATUS_BURST
from etude.operator.manifests import Ref, controller_uid
from etude.v1 import run_pb2

KEY = Ref("Checkpoint", "lab", "before-the-demo")
DIGEST = f"{7:064x}"
TOOL = {"apiVersion": "v1", "kind": "ConfigMap", "name": "tool", "uid": "u1", "controller": True}


def asked(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": KEY.name, "namespace": KEY.namespace},
        "spec": {"runRef": {"name": "demo"}, "reason": "Manual", **spec},
    }


@pytest.fixture
async def running(lab: Any, run_body: Any) -> Any:
    lab.cluster.upsert(run_body(checkpointing={"keepLast": 1}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    return lab


def found(lab: Any) -> Checkpoint:
    return Checkpoint.model_validate(lab.cluster.objects()[KEY])


def orders(lab: Any) -> list[str]:
    """UIDs of the requests that the controller was handed."""
    given = [r.checkpoint.request for r in lab.peers.commands if r.HasField("checkpoint")]
    return sorted(set(given))


def record(lab: Any, step: int = 7, request: str = "") -> run_pb2.CheckpointRecord:
    return run_pb2.CheckpointRecord(
        step=step,
        reason="Manual",
        uri=f"s3://runs/demo/checkpoints/{step:012d}",
        manifest_digest=DIGEST,
        size_bytes=10,
        policy_version=3,
        metrics={"reward": "0.5"},
        request=request or found(lab).metadata.uid,
    )


async def test_a_request_is_written_by_its_run_and_read_back(running: Any) -> None:
    running.cluster.upsert(asked())
    await running.settle()
    request = found(running)
    assert orders(running) == [request.metadata.uid]
    assert request.status.phase == "Writing"
    assert request.metadata.finalizers == ("etude.dev/checkpoint-data",)
    assert controller_uid(running.cluster.objects()[KEY]) == running.run().metadata.uid
    await running.tell(record(running))
    assert found(running).status.phase == "Verifying"
    await running.finish_jobs()
    await running.advance(5)
    made = found(running)
    assert (made.status.phase, made.status.step, made.status.policy_version) == ("Ready", 7, 3)
    assert dict(made.status.metrics) == {"reward": "0.5"}
    assert made.status.storage == running.run().spec.storage
    assert running.run().status.last_checkpoint.name == KEY.name
    assert running.names("Checkpoint") == [KEY.name]


async def test_what_was_written_is_noted_at_once_however_much_was_said_of_the_request(
    running: Any,
) -> None:
    running.cluster.upsert(asked())
    await running.settle()
    state = running.reconciler.writer._states[running.cluster.get(KEY)["metadata"]["uid"]]
    state.tokens = state.tokens.take(STATUS_BURST)
    await running.tell(record(running))
    assert found(running).status.uri == record(running).uri


async def test_a_request_is_ordered_once_however_often_the_operator_dies(running: Any) -> None:
    running.cluster.upsert(asked())
    await running.settle()
    await running.kill()
    await running.advance(30)
    await running.tell(record(running))
    before = len(running.peers.commands)
    await running.kill()
    await running.advance(30)
    later = [r for r in running.peers.commands[before:] if r.HasField("checkpoint")]
    assert later == []
    assert len({r.command_id for r in running.peers.commands if r.HasField("checkpoint")}) == 1


async def test_a_new_controller_that_tells_of_it_again_changes_nothing(running: Any) -> None:
    running.cluster.upsert(asked())
    await running.settle()
    await running.tell(record(running))
    await running.finish_jobs()
    running.new_controller()
    await running.kill()
    await running.tell(record(running))
    assert running.names("Checkpoint") == [KEY.name]
    assert found(running).status.phase == "Ready"


async def test_what_was_asked_for_is_never_superseded(running: Any) -> None:
    running.cluster.upsert(asked())
    await running.settle()
    await running.tell(record(running))
    for step in (10, 20, 30):
        await running.tell_checkpoint(step)
        await running.finish_jobs()
    await running.finish_jobs()
    await running.advance(5)
    assert len(running.names("Checkpoint")) == 2
    assert KEY.name in running.names("Checkpoint")


async def test_a_request_waits_for_a_run_that_does_not_run(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(asked())
    await lab.settle()
    assert found(lab).status.conditions[0].reason == "RunNotFound"
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    await lab.advance(5)
    assert found(lab).status.phase == "Pending"
    assert found(lab).status.conditions[0].reason == "WaitingForRun"
    lab.cluster.upsert(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.advance(5)
    assert found(lab).status.phase == "Writing"
    assert orders(lab) == [found(lab).metadata.uid]


async def test_a_request_that_its_run_outlived_fails_and_names_what_there_is(running: Any) -> None:
    running.cluster.upsert(asked())
    await running.settle()
    await running.tell_checkpoint(40)
    await running.finish_jobs()
    await running.say(state=run_pb2.RUN_STATE_DONE, step=40)
    await running.advance(10)
    await running.advance(5)
    status = found(running).status
    assert (status.phase, status.conditions[0].reason) == ("Failed", "RunOver")
    assert "demo-s00000040" in status.conditions[0].message


async def test_a_request_that_failed_is_not_fulfilled_by_a_later_run_of_the_name(
    running: Any, run_body: Any
) -> None:
    await running.say(state=run_pb2.RUN_STATE_DONE, step=40)
    await running.tell_checkpoint(40)
    await running.finish_jobs()
    await running.advance(10)
    running.cluster.upsert(asked())
    await running.settle()
    assert found(running).status.phase == "Failed"
    why = found(running).status.conditions[0].message
    running.cluster.remove(Ref("RLRun", "lab", "demo"))
    await running.advance(10)
    assert found(running).status.phase == "Failed"
    body = run_body()
    body["metadata"]["uid"] = "uid-later"
    running.cluster.upsert(body)
    await running.settle()
    running.new_controller()
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await running.advance(10)
    status = found(running).status
    assert (status.phase, status.conditions[0].reason) == ("Failed", "RunOver")
    assert status.conditions[0].message == why
    assert controller_uid(running.cluster.objects()[KEY]) == ""
    assert orders(running) == []


async def test_a_request_that_failed_is_observed_when_it_is_pinned(running: Any) -> None:
    running.cluster.upsert(asked(runRef={"name": "demo", "uid": "another"}))
    await running.settle()
    running.cluster.upsert(asked(runRef={"name": "demo", "uid": "another"}, pinned=True))
    await running.settle()
    status = found(running).status
    assert status.phase == "Failed"
    assert status.observed_generation == found(running).metadata.generation > 1


async def test_a_request_for_an_earlier_run_of_the_name_is_refused(running: Any) -> None:
    running.cluster.upsert(asked(runRef={"name": "demo", "uid": "another"}))
    await running.settle()
    assert found(running).status.conditions[0].reason == "RunOver"
    assert orders(running) == []


async def test_an_owner_that_its_maker_wrote_is_replaced_by_the_run_that_it_names(
    running: Any,
) -> None:
    forged = asked()
    stranger = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": "u1"}
    forged["metadata"]["ownerReferences"] = [{**stranger, "controller": True}, stranger]
    running.cluster.upsert(forged)
    await running.settle()
    manifest = running.cluster.objects()[KEY]
    assert controller_uid(manifest) == running.run().metadata.uid
    assert stranger in manifest["metadata"]["ownerReferences"], "whoever waits for it may"
    assert orders(running) == [found(running).metadata.uid]


@pytest.mark.parametrize("owners", [[], [TOOL]], ids=["nobody's", "a tool's"])
async def test_whoever_undoes_an_adoption_is_not_fought(
    running: Any, owners: list[dict[str, Any]]
) -> None:
    forged = asked()
    forged["metadata"] |= {"ownerReferences": owners, "annotations": {"a": "b"}}
    running.cluster.upsert(forged)
    await running.settle()
    run_uid = running.run().metadata.uid
    taken_over = dict(running.cluster.objects()[KEY]["metadata"]["annotations"])
    assert taken_over == {"a": "b", "etude.dev/adopted-by": run_uid}
    ours = running.cluster.objects()[KEY]["metadata"]["ownerReferences"]
    again = asked()
    again["metadata"]["ownerReferences"] = owners
    before = len(running.writes)
    for _ in range(5):
        running.cluster.upsert(again)
        await running.advance(5)
    writes = running.writes[before:]
    assert [w for w in writes if w.startswith("adopt")] == []
    assert len(writes) == 1, "the status, once"
    ready = found(running).status.conditions[0]
    assert (ready.reason, found(running).status.phase) == ("WaitingForRun", "Pending")
    assert "ownerReferences" in ready.message
    again["metadata"]["ownerReferences"] = ours
    running.cluster.upsert(again)
    await running.advance(5)
    assert found(running).status.phase == "Writing"


async def test_a_request_that_an_orphaning_deletion_left_is_taken_by_the_next_run(
    running: Any, run_body: Any
) -> None:
    running.cluster.upsert(asked())
    await running.settle()
    left = asked()
    left["metadata"]["ownerReferences"] = []
    running.cluster.upsert(left)
    running.cluster.remove(Ref("RLRun", "lab", "demo"))
    await running.settle()
    body = run_body()
    body["metadata"]["uid"] = "uid-later"
    running.cluster.upsert(body)
    await running.settle()
    await running.advance(5)
    assert controller_uid(running.cluster.objects()[KEY]) == "uid-later"


async def test_a_run_takes_no_state_for_its_own_that_does_not_name_it(running: Any) -> None:
    owner = {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "RLRun",
        "name": "demo",
        "uid": running.run().metadata.uid,
        "controller": True,
    }
    imported = asked(
        reason="Imported",
        deletionPolicy="Retain",
        step=99,
        source={"uri": "s3://elsewhere/state", "manifestDigest": DIGEST},
        storage={"uri": "s3://elsewhere"},
    )
    del imported["spec"]["runRef"]
    imported["metadata"]["ownerReferences"] = [owner]
    running.cluster.upsert(imported)
    await running.settle()
    await running.finish_jobs()
    await running.advance(5)
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=2)
    await running.advance(30)
    assert running.run().status.step.current == 2
    assert found(running).status.phase == "Ready"
    assert running.run().status.last_checkpoint is None


async def test_a_request_that_is_taken_back_needs_no_job(running: Any) -> None:
    running.cluster.upsert(asked())
    await running.settle()
    request = found(running).metadata.uid
    running.cluster.remove(KEY)
    await running.settle()
    assert running.names("Checkpoint") == []
    assert running.names("Job") == []
    await running.tell(record(running, request=request))  # it was under way
    assert running.names("Checkpoint") == ["demo-s00000007-000000"]


async def test_the_data_goes_with_what_was_asked_for(running: Any) -> None:
    running.cluster.upsert(asked())
    await running.settle()
    await running.tell(record(running))
    await running.finish_jobs()
    running.cluster.remove(KEY)
    await running.settle()
    assert [job.endswith("-del") for job in running.names("Job")] == [True]
    await running.finish_jobs()
    assert running.names("Checkpoint") == []


async def test_a_run_that_fails_while_its_controller_works_saves_first(running: Any) -> None:
    running.end("demo-inference-0", exit_code=64, message="no such model")
    await running.settle()
    last = [r.suspend for r in running.peers.commands if r.HasField("suspend")]
    assert [(each.checkpoint, each.is_failure) for each in last] == [(True, True)]
    assert running.pods("trainer")
    await running.tell_checkpoint(2)
    await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=2)
    assert running.condition("Failed") == ("True", "InvalidSpec")
    assert running.pods("trainer") == []
    assert len(running.names("Checkpoint")) == 1


async def test_a_controller_that_does_not_save_in_time_is_not_waited_for(running: Any) -> None:
    running.end("demo-inference-0", exit_code=64)
    await running.settle()
    await running.advance(590)
    assert running.condition("Failed")[0] == "False"
    await running.advance(20)
    assert running.condition("Failed")[0] == "True"


async def test_with_skip_a_failing_run_saves_nothing(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(checkpointing={"onFailure": "Skip"}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    lab.end("demo-inference-0", exit_code=64)
    await lab.settle()
    last = [r.suspend for r in lab.peers.commands if r.HasField("suspend")]
    assert [each.checkpoint for each in last] == [False]
    await lab.advance(31)
    assert lab.condition("Failed")[0] == "True"


async def test_the_data_of_a_run_that_is_gone_is_deleted_by_a_job_with_a_way_out(
    running: Any,
) -> None:
    await running.tell_checkpoint(10)
    await running.finish_jobs()
    running.cluster.remove(Ref("RLRun", "lab", "demo"))
    await running.settle()
    (job,) = running.names("Job")
    assert running.names("NetworkPolicy") == [job]
    await running.finish_jobs()
    assert running.names("Checkpoint") == running.names("NetworkPolicy") == []
