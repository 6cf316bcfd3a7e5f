"""Owner of a pool: its controller reference decides, not a label."""

from collections.abc import Iterator
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool
from etude.operator.builders.certificates import CertificateMode, PlatformTls, pool_identity
from etude.operator.kube.interface import ApiRejectedError
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Manifest, Ref, labels

POOL = Ref("EnvPool", "lab", "repos")
BROKER = Ref("StatefulSet", "lab", "repos-broker")
RUN = "etude.dev/run"


def pool(**metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": POOL.name, "namespace": POOL.namespace, **metadata},
        "spec": {"templates": [{"name": "python"}], "edge": {"keysRef": {"name": "keys"}}},
    }


@pytest.fixture(autouse=True)
def is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server takes no other selector for a StatefulSet than it was made with."""
    apply = MemoryCluster.apply

    async def strict(self: Any, manifest: Manifest, *, manager: str) -> Manifest:
        live = self.objects().get(Ref(manifest["kind"], "lab", manifest["metadata"]["name"]))
        if manifest["kind"] == "StatefulSet":
            spec = manifest["spec"]
            chosen = spec["selector"]["matchLabels"].items()
            if live is not None and live["spec"]["selector"] != spec["selector"]:
                raise ApiRejectedError("spec: Forbidden: updates to statefulset spec")
            if not chosen <= spec["template"]["metadata"]["labels"].items():
                raise ApiRejectedError("`selector` does not match template `labels`")
        return await apply(self, manifest, manager=manager)

    monkeypatch.setattr(MemoryCluster, "apply", strict)


def parts(lab: Any) -> Iterator[Manifest]:
    """All that was made for a pool."""
    made = (m for m in lab.cluster.objects().values() if m["kind"] != "EnvPool")
    return (m for m in made if "etude.dev/pool" in labels(m))


def accepted(lab: Any) -> str:
    status = lab.cluster.objects()[POOL]["status"]
    return str(next(c["status"] for c in status["conditions"] if c["type"] == "Accepted"))


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_label_of_a_run_makes_no_pool_a_runs(lab: Any, *, is_late: bool) -> None:
    if is_late:
        lab.cluster.upsert(pool())
        await lab.settle()
    lab.cluster.upsert(pool(labels={RUN: "demo"}))
    await lab.settle()
    assert [m["metadata"]["name"] for m in parts(lab) if RUN in labels(m)] == []
    assert accepted(lab) == "True"
    found = EnvPool.model_validate(lab.cluster.objects()[POOL])
    assert pool_identity(PlatformTls(mode=CertificateMode.PLAINTEXT), found, "broker").run == ""


async def test_what_a_run_makes_for_itself_is_known_as_its(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    made = [m for m in parts(lab) if m["kind"] != "NetworkPolicy"]
    assert {labels(m)[RUN] for m in made} == {"demo"}
    assert len(made) > 3


async def test_a_pool_that_its_run_leaves_behind_can_be_changed(lab: Any) -> None:
    owner = {"apiVersion": "etude.dev/v1alpha1", "kind": "RLRun", "name": "demo", "uid": "r"}
    lab.cluster.upsert(pool(ownerReferences=[{**owner, "controller": True}]))
    await lab.settle()
    before = lab.cluster.objects()[BROKER]["spec"]["selector"]
    assert before["matchLabels"][RUN] == "demo"
    lab.cluster.upsert(pool(ownerReferences=[]))
    await lab.settle()
    body = pool(ownerReferences=[])
    body["spec"]["brokers"] = 2
    lab.cluster.upsert(body)
    await lab.settle()
    assert accepted(lab) == "True"
    live = lab.cluster.objects()[BROKER]["spec"]
    assert (live["replicas"], live["selector"]) == (2, before)
