"""What the API server refuses is asked of it again after a while, whatever happens meanwhile."""

from typing import Any

import pytest

from etude.operator.kube.interface import ApiRejectedError
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Ref

POOL = Ref("EnvPool", "lab", "repos")
BROKER = Ref("StatefulSet", "lab", "repos-broker")


def pool(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": POOL.name, "namespace": POOL.namespace},
        "spec": {"templates": [{"name": "python"}], **spec},
    }


@pytest.fixture
async def refused(lab: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the broker's StatefulSet was to be changed, which the API server refuses from now on."""
    lab.cluster.upsert(pool())
    await lab.settle()
    tried: list[float] = []
    apply = lab.cluster.apply

    async def picky(self: Any, manifest: Any, *, manager: str) -> Any:
        if manifest["metadata"]["name"] == BROKER.name and manifest["kind"] == BROKER.kind:
            tried.append(lab.clock.monotonic_s())
            raise ApiRejectedError("updates to statefulset spec are forbidden")
        return await apply(manifest, manager=manager)

    monkeypatch.setattr(MemoryCluster, "apply", picky)
    lab.cluster.upsert(pool(brokers=2))
    await lab.settle()
    return tried


async def test_passes_that_come_by_themselves_repeat_no_refused_write(
    lab: Any, refused: list[float]
) -> None:
    began = lab.clock.monotonic_s()
    for _ in range(12):
        lab.dirty[POOL] = None
        await lab.advance(5)
    assert [at - began for at in refused] == [0, 30, 60]
    accepted = lab.cluster.objects()[POOL]["status"]["conditions"]
    assert {c["reason"] for c in accepted if c["type"] == "Accepted"} == {"Refused"}


async def test_the_last_pass_of_many_does_not_put_the_next_try_off(
    lab: Any, refused: list[float]
) -> None:
    lab.due.clear()
    await lab.advance(29)
    lab.due.clear()
    lab.dirty[POOL] = None
    await lab.settle()
    assert len(refused) == 1
    await lab.advance(1)
    assert len(refused) == 2


async def test_another_spec_is_tried_at_once(lab: Any, refused: list[float]) -> None:
    lab.cluster.upsert(pool(brokers=3))
    await lab.settle()
    assert len(refused) == 2


async def test_a_child_that_somebody_changed_is_tried_at_once(
    lab: Any, refused: list[float]
) -> None:
    live = lab.cluster.objects()[BROKER]
    lab.cluster.set_status(BROKER, {**live.get("status", {}), "readyReplicas": 0})
    await lab.settle()
    assert len(refused) == 1, "what it says of itself is not what would be written"
    lab.cluster.upsert({**live, "spec": {**live["spec"], "revisionHistoryLimit": 1}})
    await lab.settle()
    assert len(refused) == 2


async def test_what_is_taken_again_is_done_after_the_wait(
    lab: Any, refused: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    await lab.advance(30)
    assert lab.cluster.objects()[BROKER]["spec"]["replicas"] == 2
    accepted = lab.cluster.objects()[POOL]["status"]["conditions"]
    assert {c["status"] for c in accepted if c["type"] == "Accepted"} == {"True"}
