"""A trainer as a RayCluster, with KubeRay's CRD and a stand-in for its controller."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.kube.controllers.client import controllers
from tests.support.kube.controllers.kubelet import kubelet
from tests.support.kube.controllers.kuberay import kuberay

RAY = {"workload": "RayCluster"}
ROLES = {
    "trainer": {"learnerRanks": 4, "gpusPerReplica": 2},
    "inference": {"replicas": 1},
}


@pytest.fixture
def stand_ins(plane: Mapping[str, Any], operator: Path) -> Iterator[None]:
    assert operator.exists()
    with controllers(plane, kuberay, kubelet):
        yield


def trainer(lab: Any) -> dict[str, str]:
    """The trainer's pods by uid, and what of Ray each is."""
    return {
        p["metadata"]["uid"]: p["metadata"]["labels"]["ray.io/node-type"]
        for p in lab.every("pods")
        if p["metadata"]["labels"]["etude.dev/role"] == "trainer"
    }


@pytest.mark.usefixtures("stand_ins")
def test_a_trainer_becomes_a_ray_cluster_once_there_is_kuberay(
    lab: Any, installed: Callable[[str], None]
) -> None:
    lab.run(scheduling=RAY, roles=ROLES)
    lab.until("refusal", lambda: lab.condition("Accepted") == ("False", "KubeRayNotInstalled"))
    assert lab.names("statefulsets,pods") == []
    installed("kuberay")
    lab.until("all pods", lambda: lab.condition("RolesReady") == ("True", "PodsReady"))
    assert sorted(trainer(lab).values()) == ["head", "worker"]
    assert lab.names("statefulsets") == ["demo-inference"]
    (head,) = (p for p in lab.every("pods") if p["spec"].get("hostname") == "demo-trainer-0")
    assert head["spec"]["subdomain"] == "demo-trainer"


@pytest.mark.usefixtures("stand_ins")
def test_a_failed_head_is_replaced_with_its_workers_and_a_suspended_run_has_none(
    lab: Any, installed: Callable[[str], None]
) -> None:
    installed("kuberay")
    lab.run(scheduling=RAY, roles=ROLES)
    lab.until("all pods", lambda: lab.condition("RolesReady") == ("True", "PodsReady"))
    made, before = lab.get("rayclusters", "demo"), trainer(lab)
    lab.fail(next(p for p in lab.every("pods") if p["spec"].get("hostname") == "demo-trainer-0"))
    lab.until("a restart", lambda: lab.status().get("restarts", {}).get("total") == 1)
    lab.until("other pods", lambda: len(trainer(lab)) == 2 and not before.keys() & trainer(lab))
    lab.until("all pods", lambda: lab.condition("RolesReady") == ("True", "PodsReady"))
    assert lab.status()["restarts"]["total"] == 1
    generation = lab.get("rayclusters", "demo")["metadata"]["generation"]
    assert generation == made["metadata"]["generation"]
    lab.patch("rlr", "demo", suspend=True)
    lab.until("suspension", lambda: lab.condition("Suspended") == ("True", "ByUser"))
    assert lab.names("pods") == []
    lab.until("no RayCluster", lambda: lab.names("rayclusters") == [])
