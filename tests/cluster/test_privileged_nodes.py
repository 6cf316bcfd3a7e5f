"""A pool on the chart's privileged node: 32 environments of gVisor, and a daemon that is killed."""

import asyncio
import json
import logging
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support import needs
from tests.support.environments.pool_client import Pool
from tests.support.vm import microvms

from etude.common.rpc import channels
from etude.v1 import environments_pb2, environments_pb2_grpc

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
SLOTS = 32
NODES = "vms"
RIGHTS = ("roles", "rolebindings", "clusterroles", "clusterrolebindings")

Kubectl = Callable[..., str]

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.usefixtures("crds"),
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.long,
]


@pytest.fixture
def image() -> Iterator[str]:
    """What a template names an image by that every pod sees: a folder of the checkout."""
    needs.containers()
    if Path("/tmp") in ROOT.parents:
        pytest.skip("pods have a /tmp of their own over the checkout: clone it somewhere else")
    made = microvms.small_image()
    folder = ROOT / "build" / "images" / made.address
    shutil.copytree(made.folder, folder, dirs_exist_ok=True)
    yield folder.as_uri()
    shutil.rmtree(folder)


@pytest.fixture
def chart_with_nodes(
    kubectl: Kubectl, helm: Kubectl, chart: str, namespace: str
) -> Iterator[Mapping[str, list[Any]]]:
    """The release with a privileged node for one pool; the rights of everybody before that."""
    kubectl("create", "namespace", NODES)
    kubectl("label", "namespace", NODES, "pod-security.kubernetes.io/enforce=privileged")
    before = rights(kubectl)
    node = {"namespace": namespace, "name": "machines", "slots": SLOTS, "slotMilliCpu": 5}
    node |= {"slotMemoryMib": 64, "slotDiskMib": 64}
    upgrade(kubectl, helm, chart, {"namespace": NODES, "pools": [node], "drainSeconds": 60})
    yield before
    upgrade(kubectl, helm, chart, {"namespace": "", "pools": [], "drainSeconds": 600})
    kubectl("delete", "namespace", NODES, "--wait=false")


def upgrade(kubectl: Kubectl, helm: Kubectl, chart: str, nodes: Mapping[str, Any]) -> None:
    given = ("--namespace", chart, "--reuse-values", "--set-json", f"nodes={json.dumps(nodes)}")
    helm("upgrade", "etude", str(ROOT / "helm" / "etude"), *given)
    # The operators of these tests are processes.
    kubectl("-n", chart, "scale", "deployment/etude-operator", "--replicas=0")


def rights(kubectl: Kubectl) -> dict[str, list[Any]]:
    """Rules and subjects of everything in the cluster, by kind and name."""
    found = {}
    for kind in RIGHTS:
        listed = json.loads(kubectl("get", kind, "-A", "-o", "json"))["items"]
        for each in listed:
            meta = each["metadata"]
            name = f"{kind}/{meta.get('namespace', '')}/{meta['name']}"
            found[name] = [each.get(key) for key in ("rules", "roleRef", "subjects")]
    return found


def pool_of(image: str) -> dict[str, Any]:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "machines"},
        "spec": {
            "templates": [{"name": "python", "trust": "Untrusted", "image": image}],
            "isolation": {"minimum": "Sandbox", "driver": "GVisor"},
            "replicas": 1,
            "slotsPerReplica": SLOTS,
            "slot": {"cpu": "5m", "memoryMib": 64},
            "brokers": 1,
        },
    }


def wait_until_ready(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = json.loads(kubectl("-n", namespace, "get", "envp", "machines", "-o", "json"))
        status: dict[str, Any] = found.get("status", {})
        if status.get("phase") == "Ready" and status.get("driver"):
            return status
        if time.monotonic() > deadline_s:
            pods = kubectl("-n", NODES, "describe", "pods")
            logs = kubectl("-n", NODES, "logs", "-l", "etude.dev/role=node", "--tail=40")
            pytest.fail(f"never Ready: {json.dumps(status, indent=1)}\n{pods[-4000:]}\n{logs}")
        time.sleep(0.5)


async def use_all(broker: str, node_pod: str, kubectl: Kubectl) -> dict[str, float]:
    """Use every slot at once, kill the daemon, and use the same environments again."""
    figures = {}
    async with channels.dial(broker) as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        pool = Pool(stub, environments_pb2_grpc.PoolServiceStub(channel), "empty:")
        pool.deadline_s = LIMIT_S
        began_s = time.monotonic()
        leases = await pool.launch("a", SLOTS)
        figures["launched_s"] = time.monotonic() - began_s
        assert {lease.driver for lease in leases} == {"gvisor"}
        assert {lease.isolation for lease in leases} == {environments_pb2.ISOLATION_MODERATE}
        write = {"command": "uname -r; id -u; echo $HOSTNAME-$$ > mine; cat mine"}
        said = await asyncio.gather(
            *(pool.turn(lease, ("1", "run_terminal", write)) for lease in leases)
        )
        assert {each[0].splitlines()[0] for each in said} == {"4.4.0"}
        assert {each[0].splitlines()[1] for each in said} == {"1000"}

        kill_daemon(kubectl, node_pod)
        began_s = time.monotonic()
        for lease, (first,) in zip(leases, said, strict=True):
            assert await read_again(pool, lease) == first.splitlines()[2]
        figures["adopted_s"] = time.monotonic() - began_s
        await stub.ReleaseLeases(
            environments_pb2.ReleaseLeasesRequest(lease_ids=[each.lease_id for each in leases])
        )
    return figures


async def read_again(pool: Pool, lease: environments_pb2.Lease) -> str:
    """What an environment wrote before its daemon was killed."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            (found,) = await pool.turn(lease, ("2", "run_terminal", {"command": "cat mine"}))
        except Exception:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.2)
        else:
            return found


def kill_daemon(kubectl: Kubectl, pod: str) -> None:
    """Kill the daemon in a node's pod, not the supervisor above it."""
    script = (
        "for each in /proc/[0-9]*; do"
        " [ $each != /proc/1 ] && tr '\\0' ' ' < $each/cmdline 2>/dev/null |"
        " grep -q 'etude.envserver.main nod[e]' && kill -9 ${each#/proc/}; done; true"
    )
    kubectl("-n", NODES, "exec", pod, "-c", "node", "--", "/bin/sh", "-c", script)


def test_a_privileged_node_runs_32_containers_and_gives_nobody_else_a_right(
    kubectl: Kubectl,
    chart_with_nodes: Mapping[str, list[Any]],
    namespace: str,
    image: str,
    start_operator: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    start_operator("operator")
    kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pool_of(image)))
    status = wait_until_ready(kubectl, namespace)
    assert (status["driver"], status["isolation"]) == ("gvisor", "Moderate")

    found = json.loads(kubectl("-n", NODES, "get", "pods", "-o", "json"))["items"]
    (node,) = (each["metadata"]["name"] for each in found)
    broker = json.loads(kubectl("-n", namespace, "get", "pod", "machines-broker-0", "-o", "json"))
    figures = asyncio.run(use_all(f"{broker['status']['podIP']}:7020", node, kubectl))
    log.warning("32 containers on a privileged node: %s", figures)

    after = rights(kubectl)
    assert {name: after.get(name) for name in chart_with_nodes} == chart_with_nodes
    of_vms = [
        name for name in after.keys() - chart_with_nodes.keys() if f"/{namespace}/" not in name
    ]
    assert of_vms == []
    privileged = json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "taken-over"},
            "spec": {
                "containers": [{"name": "c", "image": "x", "securityContext": {"privileged": True}}]
            },
        }
    )
    refused = kubectl("-n", namespace, "apply", "-f", "-", text=privileged, fails=True)
    assert "violates PodSecurity" in refused
