"""Jobs of checkpoints whose pods do not start: said why, and in nobody's way."""

from typing import Any

import pytest

from etude.common.api.kinds import Checkpoint
from etude.operator.checkpoints import decision as checkpoints
from etude.operator.manifests import Ref
from etude.v1 import run_pb2

WAITING = {
    "phase": "Pending",
    "containerStatuses": [
        {
            "name": "main",
            "state": {
                "waiting": {
                    "reason": "CreateContainerConfigError",
                    "message": 'secret "s3" not found',
                }
            },
        }
    ],
}
UNPLACED = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: no room"}],
}


@pytest.fixture
async def running(lab: Any, run_body: Any) -> Any:
    lab.cluster.put(run_body(checkpointing={"keepLast": 20}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    return lab


def found(lab: Any) -> dict[int, Checkpoint]:
    objects = lab.cluster.objects().items()
    made = [Checkpoint.model_validate(m) for key, m in objects if key.kind == "Checkpoint"]
    return {each.saved.step: each for each in made}


def stick(lab: Any, status: dict[str, Any]) -> None:
    for pod in lab.pods("janitor"):
        lab.cluster.set_status(Ref("Pod", "lab", pod["metadata"]["name"]), status)


def words(checkpoint: Checkpoint) -> tuple[str, str]:
    (ready,) = [c for c in checkpoint.status.conditions if c.type == "Ready"]
    return ready.reason, ready.message


@pytest.mark.parametrize(
    ("status", "said"), [(WAITING, 'secret "s3" not found'), (UNPLACED, "0/3 nodes: no room")]
)
async def test_jobs_that_cannot_start_keep_no_other_checkpoint_waiting(
    running: Any, status: dict[str, Any], said: str
) -> None:
    for step in range(1, checkpoints.MAX_JOBS + 2):
        await running.tell_checkpoint(step)
    assert len(running.names("Job")) == checkpoints.MAX_JOBS
    stuck = {pod["metadata"]["name"] for pod in running.pods("janitor")}
    stick(running, status)
    await running.advance(checkpoints.TURN_S)
    (fresh,) = {pod["metadata"]["name"] for pod in running.pods("janitor")} - stuck
    running.end(fresh, exit_code=0, restarts=0)
    await running.settle()
    phases = [each.status.phase for each in found(running).values()]
    assert sorted(phases) == [*["Ready"], *checkpoints.MAX_JOBS * ["Verifying"]]
    waiting = next(c for c in found(running).values() if c.status.phase == "Verifying")
    assert said in words(waiting)[1]


async def test_a_deletion_that_does_not_begin_says_why(running: Any) -> None:
    await running.tell_checkpoint(1)
    await running.finish_jobs()
    running.cluster.remove(Ref("Checkpoint", "lab", found(running)[1].metadata.name))
    await running.settle()
    stick(running, WAITING)
    await running.settle()
    reason, message = words(found(running)[1])
    assert (reason, found(running)[1].status.phase) == ("Deleting", "Deleting")
    assert 'secret "s3" not found' in message
