"""Runs that wait in a queue, with Kueue's CRDs and stand-ins for Kueue and JobSet."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.kube.controllers.client import controllers
from tests.support.kube.controllers.jobset import jobset
from tests.support.kube.controllers.kubelet import kubelet
from tests.support.kube.controllers.kueue import API, kueue

QUOTA = 3
"""Processors: one run of the tests has three pods of one each."""


@pytest.fixture
def queue(lab: Any, installed: Callable[[str], None]) -> str:
    """A LocalQueue with room for one run; its machines have a label."""
    installed("jobset")
    installed("kueue")
    name = lab.namespace
    quota = [{"name": "cpu", "nominalQuota": QUOTA}]
    group = {"coveredResources": ["cpu"], "flavors": [{"name": name, "resources": quota}]}
    metadata = {"metadata": {"name": name}}
    lab.apply(
        {"kind": "ResourceFlavor", **metadata, "spec": {"nodeLabels": {"pool": "fast"}}}
        | {"apiVersion": API},
        {"kind": "ClusterQueue", **metadata, "spec": {"resourceGroups": [group]}}
        | {"apiVersion": API},
        {"kind": "LocalQueue", **metadata, "spec": {"clusterQueue": name}} | {"apiVersion": API},
        {"kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}, "value": 100}
        | {"apiVersion": API},
    )
    return str(name)


@pytest.fixture
def stand_ins(plane: Mapping[str, Any], operator: Path) -> Iterator[None]:
    assert operator.exists()
    with controllers(plane, kueue, jobset, kubelet):
        yield


def runs(lab: Any, name: str = "demo") -> bool:
    return bool(lab.condition("RolesReady", name) == ("True", "PodsReady"))


def pods(lab: Any, run: str) -> list[dict[str, Any]]:
    return [p for p in lab.every("pods") if p["metadata"]["labels"]["etude.dev/run"] == run]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("admission", ["JobSet", "Workload"])
def test_a_run_starts_when_its_queue_has_room_and_goes_when_it_has_not(
    lab: Any, queue: str, admission: str
) -> None:
    scheduling = {"admission": admission, "queueName": queue}
    lab.run("first", scheduling=scheduling)
    lab.until("the first runs", lambda: runs(lab, "first"))
    for pod in pods(lab, "first"):
        assert pod["spec"]["nodeSelector"]["pool"] == "fast"
    lab.run("second", scheduling=scheduling)
    waits = ("False", "WaitingForQuota")
    lab.until("the second waits", lambda: lab.condition("QuotaReserved", "second") == waits)
    assert pods(lab, "second") == []
    assert lab.status("second")["phase"] == "Queued"
    lab.patch("clusterqueues", queue, stopPolicy="HoldAndDrain")
    evicted = ("False", "Evicted")
    lab.until("eviction", lambda: lab.condition("QuotaReserved", "first") == evicted)
    lab.until("no pods", lambda: pods(lab, "first") == [])
    lab.until("a place in the queue", lambda: lab.status("first")["phase"] == "Queued")
    lab.patch("clusterqueues", queue, stopPolicy="None")
    lab.until("the first runs again", lambda: runs(lab, "first"))
    assert pods(lab, "second") == []
    lab.patch("rlr", "first", suspend=True)
    lab.until("the second's turn", lambda: runs(lab, "second"))
    lab.until("it said", lambda: lab.condition("Suspended", "first") == ("True", "ByUser"))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("admission", ["JobSet", "Workload"])
def test_an_urgent_run_takes_the_quota_of_another(lab: Any, queue: str, admission: str) -> None:
    scheduling = {"admission": admission, "queueName": queue}
    lab.run("patient", scheduling=scheduling)
    lab.until("the patient one runs", lambda: runs(lab, "patient"))
    lab.run("hasty", scheduling={**scheduling, "workloadPriorityClassName": "urgent"})
    lab.until("the urgent one runs", lambda: runs(lab, "hasty"))
    assert pods(lab, "patient") == []
    lab.until("it said", lambda: lab.condition("QuotaReserved", "patient") == ("False", "Evicted"))
    lab.kubectl("-n", lab.namespace, "delete", "rlr", "hasty", "--timeout=60s")
    lab.until("the patient one's turn again", lambda: runs(lab, "patient"))
