"""Runs as one JobSet, with JobSet's CRD and a stand-in for its controller."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.kube.controllers.client import controllers
from tests.support.kube.controllers.jobset import jobset
from tests.support.kube.controllers.kubelet import kubelet

JOBSET = {"workload": "JobSet"}


@pytest.fixture
def stand_ins(plane: Mapping[str, Any], operator: Path) -> Iterator[None]:
    assert operator.exists()
    with controllers(plane, jobset, kubelet):
        yield


@pytest.mark.usefixtures("stand_ins")
def test_a_run_waits_for_jobset_to_be_installed_and_then_becomes_one(
    lab: Any, installed: Callable[[str], None]
) -> None:
    lab.run(scheduling=JOBSET)
    lab.until("refusal", lambda: lab.condition("Accepted") == ("False", "JobSetNotInstalled"))
    assert lab.names("statefulsets,pods,services") == []
    installed("jobset")
    lab.until("all pods", lambda: lab.condition("RolesReady") == ("True", "PodsReady"))
    assert lab.condition("Accepted") == ("True", "Accepted")
    assert lab.names("statefulsets") == []
    assert lab.names("jobs") == ["demo-inference-0", "demo-trainer-0"]
    assert len(lab.names("pods")) == 3
    service = lab.get("services", "demo-trainer")["spec"]
    (pod,) = (p for p in lab.every("pods") if "trainer" in p["metadata"]["name"])
    assert pod["spec"]["hostname"] == "demo-trainer-0-0"
    assert pod["spec"]["subdomain"] == "demo-trainer"
    assert service["selector"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.usefixtures("stand_ins")
def test_a_failed_trainer_is_replaced_alone_and_the_jobset_is_never_written(
    lab: Any, installed: Callable[[str], None]
) -> None:
    installed("jobset")
    lab.run(scheduling=JOBSET)
    lab.until("all pods", lambda: lab.condition("RolesReady") == ("True", "PodsReady"))
    made = lab.get("jobsets", "demo")
    before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in lab.every("pods")}
    (trainer,) = (name for name in before if "trainer" in name)
    lab.fail(lab.get("pods", trainer))
    lab.until("a restart", lambda: lab.status().get("restarts", {}).get("total") == 1)
    lab.until("another trainer", lambda: trainer not in lab.names("pods"))
    lab.until("all pods", lambda: lab.condition("RolesReady") == ("True", "PodsReady"))
    after = {p["metadata"]["name"]: p["metadata"]["uid"] for p in lab.every("pods")}
    assert {n: u for n, u in before.items() if n != trainer}.items() <= after.items()
    assert lab.status()["restarts"]["total"] == 1
    assert lab.status()["restarts"]["byRole"] == {"trainer": 1}
    assert lab.get("jobsets", "demo")["metadata"]["generation"] == made["metadata"]["generation"]


@pytest.mark.usefixtures("stand_ins")
def test_a_suspended_run_has_no_jobset_and_comes_back_with_what_changed(
    lab: Any, installed: Callable[[str], None]
) -> None:
    installed("jobset")
    lab.run(scheduling=JOBSET)
    lab.until("all pods", lambda: lab.condition("RolesReady") == ("True", "PodsReady"))
    lab.patch("rlr", "demo", suspend=True)
    lab.until("suspension", lambda: lab.condition("Suspended") == ("True", "ByUser"))
    assert lab.names("pods") == []
    lab.until("no JobSet", lambda: lab.names("jobsets,jobs") == [])
    near = {**JOBSET, "topology": {"required": "topology.kubernetes.io/zone"}}
    lab.patch("rlr", "demo", suspend=False, scheduling=near)
    lab.until("all pods", lambda: lab.condition("RolesReady") == ("True", "PodsReady"))
    for pod in lab.every("pods"):
        (term,) = pod["spec"]["affinity"]["podAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["topologyKey"] == "topology.kubernetes.io/zone"
        assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
