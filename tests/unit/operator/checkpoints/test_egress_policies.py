"""NetworkPolicies of checkpoint Jobs whose run has none."""

from typing import Any

import pytest

from etude.operator.manifests import Ref, is_deleting
from etude.v1 import run_pb2

RUN = Ref("RLRun", "lab", "demo")
JANITOR = Ref("NetworkPolicy", "lab", "demo-janitor")


def with_policy(run_body: Any, policy: str) -> dict[str, Any]:
    made: dict[str, Any] = run_body(network={"policy": policy})
    return made


@pytest.fixture
async def saved(lab: Any, run_body: Any) -> Any:
    """A lab with a run that has written a checkpoint."""
    lab.cluster.upsert(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.tell_checkpoint(10)
    await lab.finish_jobs()
    return lab


def delete_in_the_foreground(lab: Any) -> None:
    """As `kubectl delete --cascade=foreground`: the run stays until all that it owns is gone."""
    live = lab.cluster.objects()[RUN]
    lab.cluster.upsert(
        {**live, "metadata": {**live["metadata"], "finalizers": ["foregroundDeletion"]}}
    )
    lab.cluster.remove(RUN)


def checkpoint(lab: Any) -> Ref:
    (name,) = lab.names("Checkpoint")
    return Ref("Checkpoint", "lab", name)


async def test_a_run_that_waits_for_its_checkpoints_lets_their_jobs_out(saved: Any) -> None:
    delete_in_the_foreground(saved)
    saved.cluster.remove(JANITOR)
    saved.cluster.remove(checkpoint(saved))
    await saved.settle()
    assert RUN in saved.cluster.objects()
    (job,) = saved.names("Job")
    assert job in saved.names("NetworkPolicy")
    await saved.finish_jobs()
    assert saved.names("Checkpoint") == []


async def test_a_job_that_began_before_its_run_was_let_go_is_let_out_too(saved: Any) -> None:
    saved.cluster.remove(checkpoint(saved))
    await saved.settle()
    (job,) = saved.names("Job")
    assert job not in saved.names("NetworkPolicy"), "the run's own is enough"
    delete_in_the_foreground(saved)
    saved.cluster.remove(JANITOR)
    await saved.advance(60)
    assert job in saved.names("NetworkPolicy")


async def test_a_suspended_run_lets_the_jobs_of_its_checkpoints_out(
    saved: Any, run_body: Any
) -> None:
    saved.cluster.upsert(run_body(suspend=True))
    await saved.settle()
    await saved.say(state=run_pb2.RUN_STATE_SUSPENDED, step=1)
    assert saved.condition("Suspended")[0] == "True"
    saved.cluster.remove(checkpoint(saved))
    await saved.settle()
    (job,) = saved.names("Job")
    assert JANITOR in saved.cluster.objects()
    assert job not in saved.names("NetworkPolicy")


async def test_a_later_run_of_the_name_that_has_no_policies_yet_lets_nothing_out(
    saved: Any, run_body: Any
) -> None:
    key = checkpoint(saved)
    saved.cluster.remove(RUN)
    body = run_body(managedBy="kueue.x-k8s.io/multikueue")
    body["metadata"]["uid"] = "uid-later"
    saved.cluster.upsert(body)
    await saved.settle()
    assert is_deleting(saved.cluster.objects()[key])
    assert JANITOR not in saved.cluster.objects()
    (job,) = saved.names("Job")
    assert saved.names("NetworkPolicy") == [job]


@pytest.mark.parametrize("is_going", [False, True])
async def test_where_others_make_the_policies_a_job_gets_none(
    saved: Any, run_body: Any, *, is_going: bool
) -> None:
    saved.cluster.upsert(with_policy(run_body, "Unmanaged"))
    await saved.settle()
    assert JANITOR not in saved.cluster.objects()
    if is_going:
        delete_in_the_foreground(saved)
    saved.cluster.remove(checkpoint(saved))
    await saved.settle()
    (job,) = saved.names("Job")
    assert job not in saved.names("NetworkPolicy")
