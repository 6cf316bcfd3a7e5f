"""Runs that start from the model of a checkpoint."""

import json
from typing import Any

import pytest

from etude.operator.manifests import Ref
from etude.v1 import run_pb2

KEY = Ref("Checkpoint", "lab", "good")
MAP = Ref("ConfigMap", "lab", "demo-run")


def imported(reason: str = "Imported", **spec: Any) -> dict[str, Any]:
    source = {"uri": "s3://old/run/checkpoints/000000000040", "manifestDigest": "0" * 64}
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": KEY.name, "namespace": KEY.namespace},
        "spec": {
            "reason": reason,
            "source": source,
            "storage": {"uri": "s3://old/run"},
            "deletionPolicy": "Retain",
            **spec,
        },
    }


def given(lab: Any) -> dict[str, Any]:
    """The model as the run's processes get it."""
    found = lab.cluster.objects()[MAP]["data"]["run.json"]
    model: dict[str, Any] = json.loads(found)["spec"]["model"]
    return model


async def test_a_run_waits_for_its_checkpoint_and_starts_from_its_model(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(model={"checkpointRef": {"name": "good"}, "seed": 3}))
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "CheckpointNotReady")
    lab.cluster.upsert(imported())
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "CheckpointNotReady")
    assert lab.names("StatefulSet") == []
    await lab.finish_jobs()
    assert lab.condition("Accepted")[0] == "True"
    assert lab.pods("trainer")
    model = given(lab)
    assert model["uri"] == "s3://old/run/checkpoints/000000000040/model"
    assert model["seed"] == 3


async def test_the_model_stays_known_when_its_checkpoint_is_gone(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(imported())
    await lab.settle()
    await lab.finish_jobs()
    lab.cluster.upsert(run_body(model={"checkpointRef": {"name": "good"}}))
    await lab.settle()
    before = given(lab)
    lab.cluster.remove(KEY)
    await lab.settle()
    await lab.kill()
    await lab.settle()
    assert lab.condition("Accepted")[0] == "True"
    assert given(lab) == before


async def test_a_controller_is_configured_with_the_model_that_it_was_started_with(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(imported())
    await lab.settle()
    await lab.finish_jobs()
    body = run_body(model={"checkpointRef": {"name": "good"}})
    lab.cluster.upsert(body)
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1, observed_generation=0)
    status = run_pb2.RunStatus(phase="rl", state=run_pb2.RUN_STATE_RUNNING, step=2)
    await lab._report(run_pb2.WatchRunResponse(status=status))
    sent = [r.configure.spec_json for r in lab.peers.commands if r.HasField("configure")]
    assert sent
    assert all(json.loads(each)["model"] == given(lab) for each in sent)


@pytest.mark.parametrize("reason", ["Scheduled", "Suspend"])
async def test_a_checkpoint_without_a_model_is_no_start(
    lab: Any, run_body: Any, reason: str
) -> None:
    lab.cluster.upsert(imported(reason, runRef={"name": "gone", "uid": "u"}))
    await lab.settle()
    await lab.finish_jobs()
    lab.cluster.upsert(run_body(model={"checkpointRef": {"name": "good"}}))
    await lab.settle()
    found = next(c for c in lab.run().status.conditions if c.type == "Accepted")
    assert (found.status, found.reason) == ("False", "CheckpointNotReady")
    assert f"good is {reason} and holds no model" in found.message


async def test_what_another_run_starts_from_is_not_superseded(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(checkpointing={"keepLast": 1}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.tell_checkpoint(10)
    await lab.finish_jobs()
    (name,) = lab.names("Checkpoint")
    other = run_body(model={"checkpointRef": {"name": name}}, suspend=True)
    other["metadata"] = {**other["metadata"], "name": "other", "uid": "uid-other"}
    lab.cluster.upsert(other)
    for step in (20, 30):
        await lab.tell_checkpoint(step)
        await lab.finish_jobs()
    await lab.finish_jobs()
    assert lab.names("Checkpoint") == [name, "demo-s00000030-000000"]
