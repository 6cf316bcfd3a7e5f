"""The Job that loads a checkpoint has the pod of the run's trainer."""

import json
from typing import Any

from etude.operator.manifests import Manifest
from etude.v1 import run_pb2


def jobs(lab: Any) -> list[Manifest]:
    return [m for key, m in lab.cluster.objects().items() if key.kind == "Job"]


def container(job: Manifest) -> Manifest:
    found: Manifest = job["spec"]["template"]["spec"]["containers"][0]
    return found


def order(job: Manifest) -> dict[str, Any]:
    env = {each["name"]: each.get("value", "") for each in container(job)["env"]}
    found: dict[str, Any] = json.loads(env["ETUDE_ORDER"])
    return found


async def test_a_checkpoint_is_loaded_in_the_image_and_memory_of_its_trainer(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(checkpointing={"verify": "Load"}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.tell_checkpoint(10)
    (job,) = jobs(lab)
    assert container(job)["image"] == "etude/trainer:1"
    assert container(job)["command"] == ["python", "-m", "etude.trainer.commands.check_checkpoint"]
    assert container(job)["resources"]["requests"]["memory"] == "4Gi"
    assert "nvidia.com/gpu" not in json.dumps(job)
    assert order(job)["model"] == "s3://inputs/model"
    assert order(job)["depth"] == "Load"
    await lab.finish_jobs()
    summary = lab.run().status.last_checkpoint
    assert summary is not None
    assert summary.step == 10


async def test_one_that_cannot_be_loaded_is_corrupt(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(checkpointing={"verify": "Load"}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.tell_checkpoint(10)
    for _ in range(3):
        await lab.finish_jobs(exit_code=65, message="tensor 'model.x' is not of this model")
    assert lab.condition("CheckpointHealthy") == ("False", "Corrupt")


async def test_other_checks_ask_for_no_trainer(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(checkpointing={"verify": "Manifest"}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.tell_checkpoint(10)
    (job,) = jobs(lab)
    assert container(job)["image"] == "etude/operator:1"
    assert "model" not in order(job)
