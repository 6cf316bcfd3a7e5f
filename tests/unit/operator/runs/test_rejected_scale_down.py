"""Workload changes that the cluster rejects: the pods are released all the same."""

from collections.abc import Iterator
from typing import Any

import pytest

from etude.operator.kube.interface import ApiRejectedError
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Ref
from etude.v1 import run_pb2


@pytest.fixture
async def ruled(lab: Any, run_body: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run that works; from here on a policy refuses its StatefulSets and its pool as they are."""
    lab.cluster.upsert(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    apply = lab.cluster.apply

    async def ruling(self: Any, manifest: Any, *, manager: str) -> Any:
        if manifest["kind"] in {"StatefulSet", "EnvPool"}:
            raise ApiRejectedError(f"{manifest['metadata']['name']}: its images have no digest")
        return await apply(manifest, manager=manager)

    monkeypatch.setattr(MemoryCluster, "apply", ruling)
    return lab


def pods(lab: Any) -> Iterator[str]:
    roles = ("trainer", "inference", "rewards", "node")
    return (pod["metadata"]["name"] for role in roles for pod in lab.pods(role))


async def test_a_run_is_suspended_after_its_checkpoint(ruled: Any, run_body: Any) -> None:
    ruled.cluster.upsert(run_body(suspend=True))
    await ruled.settle()
    assert "demo-trainer-0" in pods(ruled), "it saves first"
    await ruled.say(state=run_pb2.RUN_STATE_SUSPENDED, step=1)
    assert list(pods(ruled)) == []
    assert ruled.condition("Suspended") == ("True", "ByUser")


async def test_a_run_whose_restart_is_refused_can_be_suspended(ruled: Any, run_body: Any) -> None:
    ruled.end("demo-trainer-0", exit_code=1)
    await ruled.settle()
    assert ruled.run().status.intent.type == "Restart"
    ruled.cluster.upsert(run_body(suspend=True))
    await ruled.settle()
    assert list(pods(ruled)) == []
    assert ruled.condition("Suspended") == ("True", "ByUser")
    assert ruled.run().status.restarts.total == 1


async def test_a_deadline_ends_a_run_whose_restart_is_refused(ruled: Any, run_body: Any) -> None:
    ruled.cluster.upsert(run_body(deadlines={"activeSeconds": 100}))
    ruled.end("demo-trainer-0", exit_code=1)
    await ruled.settle()
    await ruled.advance(101)
    assert ruled.condition("Failed") == ("True", "DeadlineExceeded")
    assert list(pods(ruled)) == []


async def test_a_run_that_works_keeps_what_a_policy_does_not_take(ruled: Any) -> None:
    uid = ruled.cluster.objects()[Ref("StatefulSet", "lab", "demo-trainer")]["metadata"]["uid"]
    ruled.end("demo-inference-0", exit_code=1, restarts=5)
    await ruled.advance(60)
    live = ruled.cluster.objects()[Ref("StatefulSet", "lab", "demo-trainer")]
    assert live["metadata"]["uid"] == uid
    assert "demo-trainer-0" in pods(ruled)
