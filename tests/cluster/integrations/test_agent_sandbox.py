"""Pools of Sandboxes, with agent-sandbox's CRDs and a stand-in for its controller."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.kube.controllers.agent_sandbox import agent_sandbox
from tests.support.kube.controllers.client import controllers
from tests.support.kube.controllers.kubelet import kubelet
from tests.support.kube.controllers.objects import is_true

TEMPLATE = {
    "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
    "kind": "SandboxTemplate",
    "metadata": {"name": "walled"},
    "spec": {
        "podTemplate": {
            "metadata": {"labels": {"team": "research"}},
            "spec": {
                "nodeSelector": {"sandbox": "yes"},
                "containers": [{"name": "node", "resources": {"requests": {"cpu": "500m"}}}],
            },
        }
    },
}


def pool(replicas: int) -> dict[str, Any]:
    spec = {
        "backend": "AgentSandbox",
        "sandboxTemplateRef": {"name": "walled"},
        "templates": [{"name": "python", "trust": "Trusted"}],
        "isolation": {"minimum": "Process", "driver": "Process"},
        "slotsPerReplica": 1,
        "replicas": replicas,
    }
    kind = {"apiVersion": "etude.dev/v1alpha1", "kind": "EnvPool", "metadata": {"name": "boxes"}}
    return {**kind, "spec": spec}


@pytest.fixture
def stand_ins(plane: Mapping[str, Any], operator: Path) -> Iterator[None]:
    assert operator.exists()
    with controllers(plane, agent_sandbox, kubelet):
        yield


def accepted(lab: Any) -> tuple[str, str]:
    conditions = lab.get("envp", "boxes").get("status", {}).get("conditions", ())
    found: dict[str, str] = next((c for c in conditions if c["type"] == "Accepted"), {})
    return found.get("status", ""), found.get("reason", "")


def ready(lab: Any) -> int:
    return int(lab.get("envp", "boxes").get("status", {}).get("readyReplicas", 0))


def sandboxes(lab: Any) -> dict[str, str]:
    """Names of all Sandboxes that there are, by their UIDs."""
    found = (each["metadata"] for each in lab.every("sandboxes"))
    return {metadata["uid"]: metadata["name"] for metadata in found}


def ready_pods(lab: Any) -> set[str]:
    """UIDs of the Sandboxes whose pods are Ready."""
    return {
        owner["uid"]
        for pod in lab.every("pods")
        for owner in pod["metadata"].get("ownerReferences", ())
        if owner["kind"] == "Sandbox" and is_true(pod, "Ready")
    }


@pytest.mark.usefixtures("stand_ins")
def test_a_pool_waits_for_agent_sandbox_and_its_template_and_then_has_sandboxes(
    lab: Any, installed: Callable[[str], None]
) -> None:
    lab.kubectl("label", "namespace", lab.namespace, "etude.dev/weak-isolation=allow")
    lab.apply(pool(2))
    lab.until("refusal", lambda: accepted(lab) == ("False", "AgentSandboxNotInstalled"))
    assert lab.names("statefulsets,pods,services") == []
    installed("agent-sandbox")
    lab.until("a word", lambda: accepted(lab) == ("False", "SandboxTemplateNotFound"))
    lab.apply(TEMPLATE)
    lab.until("two nodes", lambda: ready(lab) == 2)
    assert accepted(lab) == ("True", "Accepted")
    assert lab.names("sandboxes") == ["boxes-node-0", "boxes-node-1"]
    made = lab.get("pods", "boxes-node-0")
    assert (
        made["metadata"]["labels"].items() >= {"team": "research", "etude.dev/role": "node"}.items()
    )
    assert made["spec"]["nodeSelector"] == {"sandbox": "yes"}
    (container,) = made["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == "500m"
    assert container["command"] == ["etude-envserver", "node"]


@pytest.mark.usefixtures("stand_ins")
def test_a_sandbox_that_failed_is_replaced_and_one_too_many_goes(
    lab: Any, installed: Callable[[str], None]
) -> None:
    installed("agent-sandbox")
    lab.kubectl("label", "namespace", lab.namespace, "etude.dev/weak-isolation=allow")
    lab.apply(TEMPLATE, pool(2))
    lab.until("two nodes", lambda: ready(lab) == 2)
    before = sandboxes(lab)
    (stays,) = (uid for uid, name in before.items() if name == "boxes-node-0")
    words = ("patch", "pod", "boxes-node-1", "--subresource=status", "--type=merge", "-p")
    lab.kubectl("-n", lab.namespace, *words, '{"status": {"phase": "Failed", "conditions": []}}')
    # Its successor has the next name, unless the one that failed was gone by then.
    lab.until(
        "another Sandbox",
        lambda: len(now := sandboxes(lab)) == 2 and now.keys() & before.keys() == {stays},
    )
    lab.until("pods of both", lambda: ready_pods(lab) == sandboxes(lab).keys())
    lab.until("two nodes", lambda: ready(lab) == 2)
    lab.patch("envp", "boxes", replicas=0)
    lab.until("none", lambda: lab.names("sandboxes,pods") == [])
