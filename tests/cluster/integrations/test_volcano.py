"""Runs whose pods are placed together, with Volcano's CRD and a stand-in for its scheduler."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.kube.controllers.client import controllers
from tests.support.kube.controllers.kubelet import kubelet
from tests.support.kube.controllers.volcano import volcano

GANG = {"idleRoles": "Hold", "gang": {"provider": "Volcano", "timeoutSeconds": 1}}
"""Of all pods, engines included, which a supervised run would not start otherwise."""


@pytest.fixture
def stand_ins(plane: Mapping[str, Any], operator: Path) -> Iterator[None]:
    assert operator.exists()
    with controllers(plane, volcano, kubelet):
        yield


@pytest.mark.usefixtures("stand_ins")
def test_a_run_waits_for_volcano_and_its_pods_for_nodes_for_all_of_them(
    lab: Any, installed: Callable[[str], None]
) -> None:
    lab.run(scheduling=GANG)
    lab.until("refusal", lambda: lab.condition("Accepted") == ("False", "VolcanoNotInstalled"))
    assert lab.names("statefulsets,pods,services") == []
    installed("volcano")
    lab.until("a late gang", lambda: lab.condition("PodsScheduled") == ("False", "GangTimeout"))
    assert lab.get("podgroups", "demo")["spec"]["minMember"] == 3
    assert not any(pod["spec"].get("nodeName") for pod in lab.every("pods"))
    lab.kubectl("-n", lab.namespace, "annotate", "podgroup", "demo", "test/room=3")
    lab.until("all pods", lambda: lab.condition("PodsScheduled") == ("True", "Scheduled"))
    assert all(pod["spec"].get("nodeName") for pod in lab.every("pods"))


@pytest.mark.usefixtures("stand_ins")
def test_a_run_that_is_suspended_while_it_waits_leaves_no_group(
    lab: Any, installed: Callable[[str], None]
) -> None:
    installed("volcano")
    lab.run(scheduling={**GANG, "gang": {"provider": "Volcano", "scope": "PerRole"}})
    lab.until("a refusal", lambda: lab.condition("PodsScheduled") == ("False", "Unschedulable"))
    assert lab.names("podgroups") == ["demo-inference", "demo-trainer"]
    lab.patch("rlr", "demo", suspend=True)
    lab.until("suspension", lambda: lab.condition("Suspended") == ("True", "ByUser"))
    lab.until("no group", lambda: lab.names("podgroups") == [])
