"""Pools whose hosts are Sandboxes of agent-sandbox."""

from dataclasses import replace
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool
from etude.operator.clock import rfc3339
from etude.operator.kube.workload_controllers import ready_status
from etude.operator.manifests import Manifest, Ref, ref, uid

KEY = Ref("EnvPool", "lab", "boxes")
GROUPS = frozenset({"Sandbox", "SandboxTemplate"})


def body(replicas: int = 2, **spec: Any) -> Manifest:
    found = {
        "backend": "AgentSandbox",
        "sandboxTemplateRef": {"name": "walled"},
        "templates": [{"name": "python"}],
        "isolation": {"minimum": "Process", "driver": "Process"},
        "slotsPerReplica": 1,
        "replicas": replicas,
    }
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "boxes", "namespace": "lab"},
        "spec": {**found, **spec},
    }


def template(**spec: Any) -> Manifest:
    pod = {"metadata": {"labels": {"team": "research"}}, "spec": spec}
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "walled", "namespace": "lab"},
        "spec": {"podTemplate": pod},
    }


def pod_of(sandbox: Manifest) -> Manifest:
    """What agent-sandbox makes of a Sandbox."""
    owner = {"kind": "Sandbox", "name": sandbox["metadata"]["name"], "uid": uid(sandbox)}
    made = sandbox["spec"]["podTemplate"]
    metadata = {**made["metadata"], "name": sandbox["metadata"]["name"], "namespace": "lab"}
    metadata["ownerReferences"] = [{**owner, "controller": True}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": made["spec"]}


@pytest.fixture
def boxes(lab: Any) -> Any:
    """A cluster with agent-sandbox, whose controller answers every Sandbox with a pod."""
    lab.platform = replace(lab.platform, integrations=frozenset({"agentSandbox"}))
    lab.start()
    lab.cluster.integrations = GROUPS
    lab.cluster.upsert(template(runtimeClassName="gvisor"))

    def controller(manifest: Manifest) -> None:
        known = lab.cluster.objects()
        has_pod = ref(manifest)._replace(kind="Pod") in known
        if manifest["kind"] == "Sandbox" and ref(manifest) in known and not has_pod:
            lab.cluster.upsert(pod_of(manifest))

    lab.cluster.subscribe(controller)
    return lab


def status(lab: Any) -> Any:
    return EnvPool.model_validate(lab.cluster.objects()[KEY]).status


def accepted(lab: Any) -> tuple[str, str]:
    found = next(c for c in status(lab).conditions if c.type == "Accepted")
    return found.reason, found.message


async def test_each_host_is_a_sandbox_whose_pod_the_template_is_laid_over(boxes: Any) -> None:
    boxes.cluster.upsert(body())
    await boxes.settle()
    assert boxes.names("Sandbox") == ["boxes-node-0", "boxes-node-1"]
    made = boxes.cluster.objects()[Ref("Sandbox", "lab", "boxes-node-0")]["spec"]["podTemplate"]
    assert made["spec"]["runtimeClassName"] == "gvisor"
    assert made["spec"]["containers"][0]["command"] == ["etude-envserver", "node"]
    assert made["metadata"]["labels"]["team"] == "research"
    assert made["metadata"]["labels"]["etude.dev/pool"] == "boxes"
    found = status(boxes)
    assert (found.phase, found.replicas, found.ready_replicas) == ("Ready", 2, 2)


async def test_a_change_of_the_template_is_for_hosts_that_come(boxes: Any) -> None:
    boxes.cluster.upsert(body(1))
    await boxes.settle()
    boxes.cluster.upsert(template(runtimeClassName="kata"))
    boxes.cluster.upsert(body(2))
    await boxes.settle()
    of = {
        name: boxes.cluster.objects()[Ref("Sandbox", "lab", name)]["spec"]["podTemplate"]["spec"]
        for name in boxes.names("Sandbox")
    }
    assert of["boxes-node-0"]["runtimeClassName"] == "gvisor"
    assert of["boxes-node-1"]["runtimeClassName"] == "kata"


async def test_the_sandbox_of_a_pod_that_is_over_is_replaced(boxes: Any) -> None:
    boxes.cluster.upsert(body())
    await boxes.settle()
    key = Ref("Sandbox", "lab", "boxes-node-0")
    before = uid(boxes.cluster.objects()[key])
    boxes.cluster.set_status(key._replace(kind="Pod"), {"phase": "Failed"})
    await boxes.settle()
    assert uid(boxes.cluster.objects()[key]) != before
    assert status(boxes).ready_replicas == 2


async def test_fewer_hosts_are_fewer_sandboxes(boxes: Any) -> None:
    boxes.cluster.upsert(body())
    await boxes.settle()
    boxes.cluster.upsert(body(1))
    await boxes.settle()
    assert boxes.names("Sandbox") == ["boxes-node-0"]


async def test_a_pod_that_outlives_its_sandbox_counts_until_it_is_gone(boxes: Any) -> None:
    boxes.cluster.upsert(body())
    await boxes.settle()
    sandbox = boxes.cluster.objects()[Ref("Sandbox", "lab", "boxes-node-1")]
    left = pod_of({**sandbox, "metadata": {**sandbox["metadata"], "uid": "of-one-that-is-gone"}})
    left["metadata"] |= {"name": "boxes-node-7", "deletionTimestamp": rfc3339(0)}
    boxes.cluster.kubelet.stop = lambda *_: None
    boxes.cluster.upsert({**left, "status": ready_status(left)})
    await boxes.settle()
    found = status(boxes)
    assert (found.replicas, found.terminating) == (2, 1)


async def test_without_its_api_a_pool_has_no_children_and_goes_on_once_it_is_there(
    boxes: Any,
) -> None:
    boxes.cluster.integrations = frozenset()
    boxes.cluster.upsert(body())
    await boxes.settle()
    assert accepted(boxes)[0] == "AgentSandboxNotInstalled"
    assert boxes.names("Sandbox") == boxes.names("StatefulSet") == []
    boxes.cluster.integrations = GROUPS
    await boxes.advance(10)
    assert status(boxes).ready_replicas == 2


async def test_a_platform_that_does_not_allow_it_says_which_value_does(lab: Any) -> None:
    lab.cluster.integrations = GROUPS
    lab.cluster.upsert(body())
    await lab.settle()
    reason, message = accepted(lab)
    assert reason == "FeatureDisabled"
    assert "integrations.agentSandbox.enabled" in message


async def test_a_template_that_is_not_there_is_waited_for(boxes: Any) -> None:
    boxes.cluster.upsert(body(sandboxTemplateRef={"name": "other"}))
    await boxes.settle()
    assert accepted(boxes)[0] == "SandboxTemplateNotFound"
    other = template()
    other["metadata"]["name"] = "other"
    boxes.cluster.upsert(other)
    await boxes.advance(10)
    assert accepted(boxes)[0] == "Accepted"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"hostNetwork": True}, "spec.hostNetwork"),
        ({"volumes": [{"name": "all", "hostPath": {"path": "/"}}]}, "hostPath"),
        (
            {"containers": [{"name": "node", "env": [{"name": "ETUDE_BROKER_TARGET"}]}]},
            "ETUDE_BROKER_TARGET",
        ),
    ],
)
async def test_a_template_that_would_undo_what_the_operator_gives_is_refused(
    boxes: Any, spec: Manifest, words: str
) -> None:
    boxes.cluster.upsert(template(**spec))
    boxes.cluster.upsert(body())
    await boxes.settle()
    reason, message = accepted(boxes)
    assert reason == "InvalidParameters"
    assert words in message
    assert boxes.names("Sandbox") == []


async def test_a_template_may_not_take_labels_of_ours(boxes: Any) -> None:
    taken = template()
    taken["spec"]["podTemplate"]["metadata"]["labels"] = {"etude.dev/pool": "other"}
    boxes.cluster.upsert(taken)
    boxes.cluster.upsert(body())
    await boxes.settle()
    assert "etude.dev/pool is reserved for the operator" in accepted(boxes)[1]
