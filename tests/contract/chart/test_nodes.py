"""Privileged nodes of pools: where they are, what they may, and what they have no part in."""

from typing import Any

import pytest
from tests.support.chart.helm import refusal, rendered

POOL = {
    "namespace": "lab",
    "name": "machines",
    "slots": 16,
    "slotMilliCpu": 50,
    "slotMemoryMib": 64,
    "slotDiskMib": 128,
}
NODES: dict[str, Any] = {"namespace": "vms", "pools": [POOL]}


def test_there_are_none_unless_a_pool_is_listed() -> None:
    kinds = {each["kind"] for each in rendered({}).manifests}
    assert "DaemonSet" not in kinds


@pytest.mark.parametrize("mode", ["SelfManaged", "Plaintext"])
def test_a_listed_pool_has_a_privileged_node_that_requests_what_its_slots_promise(
    mode: str,
) -> None:
    found = rendered({"nodes": NODES, "tls": {"mode": mode}}).one("DaemonSet")
    assert found["metadata"]["namespace"] == "vms"
    spec = found["spec"]["template"]["spec"]
    (node,) = spec["containers"]
    assert node["securityContext"]["privileged"] is True
    asked = {"cpu": "800m", "memory": "1536Mi", "ephemeral-storage": "2048Mi"}
    assert node["resources"]["requests"] == asked
    assert node["resources"]["limits"] == {
        name: asked[name] for name in ("memory", "ephemeral-storage")
    }


@pytest.mark.parametrize("mode", ["SelfManaged", "Plaintext"])
def test_a_node_holds_no_account_no_secret_and_no_folder_of_its_machine(mode: str) -> None:
    found = rendered({"nodes": NODES, "tls": {"mode": mode}}).one("DaemonSet")
    spec = found["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert not kinds & {"secret", "hostPath"}
    assert not {"hostPID", "hostNetwork", "hostIPC"} & spec.keys()
    (node,) = spec["containers"]
    assert "envFrom" not in node


def test_rights_of_the_operator_are_the_same_with_and_without_nodes() -> None:
    def rights(values: dict[str, Any]) -> list[Any]:
        kinds = {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
        return [each for each in rendered(values).manifests if each["kind"] in kinds]

    assert rights({"nodes": NODES}) == rights({})


def test_only_the_node_is_privileged() -> None:
    for each in rendered({"nodes": NODES}).manifests:
        template = each.get("spec", {}).get("template", {})
        if isinstance(template, dict) and each["kind"] != "DaemonSet":
            assert "privileged" not in str(template)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"nodes": {"pools": [POOL]}}, "need a namespace of their own"),
        ({"nodes": {"namespace": "lab", "pools": [POOL]}}, "lies in nodes.namespace"),
        (
            {"nodes": NODES, "tls": {"mode": "Secret", "secretName": "wire"}},
            "tls.mode Secret gives no certificates",
        ),
    ],
)
def test_what_would_not_work_is_refused(values: dict[str, Any], why: str) -> None:
    assert why in refusal(values)
