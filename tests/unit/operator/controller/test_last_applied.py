"""A cluster that writes down another thing than it was given is told so once."""

from typing import Any

import pytest

from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Manifest, Ref, has_fields_of
from etude.v1 import run_pb2

TRAINER = Ref("StatefulSet", "lab", "demo-trainer")


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[Ref]:
    """StatefulSets that were applied, by a cluster that takes all images from a mirror."""
    found: list[Ref] = []
    apply = MemoryCluster.apply

    async def mirrored(self: Any, manifest: Manifest, *, manager: str) -> Manifest:
        if manifest["kind"] == "StatefulSet":
            found.append(Ref("StatefulSet", "lab", manifest["metadata"]["name"]))
            template = manifest["spec"]["template"]
            (main,) = template["spec"]["containers"]
            inner = {**template["spec"], "containers": [{**main, "image": f"m/{main['image']}"}]}
            spec = {**manifest["spec"], "template": {**template, "spec": inner}}
            manifest = {**manifest, "spec": spec}
        return await apply(self, manifest, manager=manager)

    monkeypatch.setattr(MemoryCluster, "apply", mirrored)
    return found


async def test_what_a_webhook_changes_is_applied_once(
    lab: Any, run_body: Any, applied: list[Ref]
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    for step in range(20):
        await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=step)
        await lab.advance(10)
    assert applied.count(TRAINER) <= 2, "when it was made, and again by who had not seen it made"


async def test_what_somebody_changes_beside_it_is_still_put_right(
    lab: Any, run_body: Any, applied: list[Ref]
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    live = lab.cluster.objects()[TRAINER]
    lab.cluster.upsert({**live, "spec": {**live["spec"], "replicas": 5}})
    await lab.settle()
    assert lab.cluster.objects()[TRAINER]["spec"]["replicas"] == 1


async def test_what_the_run_wants_next_is_applied(
    lab: Any, run_body: Any, applied: list[Ref]
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    await lab.advance(700)
    await lab.advance(700)
    assert lab.cluster.objects()[TRAINER]["spec"]["replicas"] == 0


def test_a_number_is_the_quantity_that_a_cluster_writes_for_it() -> None:
    wanted = {"resources": {"limits": {"cpu": 2, "example.com/fpga": 1}}}
    live = {"resources": {"limits": {"cpu": "2", "example.com/fpga": "1"}}}
    assert has_fields_of({"pod": live}, {"pod": wanted})
    live["resources"]["limits"]["cpu"] = "3"
    assert not has_fields_of({"pod": live}, {"pod": wanted})
