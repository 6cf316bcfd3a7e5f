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
from tests.support.kube import privileged_nodes
from tests.support.kube.privileged_nodes import LIMIT_S, NODES
from tests.support.kube.testbeds import Program
from tests.support.vm import microvms

from etude.common.rpc import channels
from etude.v1 import environments_pb2, environments_pb2_grpc

ROOT = Path(__file__).parents[2]
SLOTS = 32

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
    kubectl: Program, helm: Program, chart: str, namespace: str
) -> Iterator[Mapping[str, list[Any]]]:
    """The release with a privileged node for one pool; the rights of everybody before that."""
    privileged_nodes.make_namespace(kubectl)
    before = privileged_nodes.rights(kubectl)
    node = {"namespace": namespace, "name": "machines", "slots": SLOTS, "slotMilliCpu": 5}
    node |= {"slotMemoryMib": 64, "slotDiskMib": 64}
    nodes = {"namespace": NODES, "pools": [node], "drainSeconds": 60}
    privileged_nodes.upgrade(kubectl, helm, chart, nodes)
    yield before
    privileged_nodes.remove_nodes(kubectl, helm, chart)


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


async def use_all(broker: str, node_pod: str, kubectl: Program) -> dict[str, float]:
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

        privileged_nodes.kill_daemon(kubectl, node_pod)
        began_s = time.monotonic()
        for lease, (first,) in zip(leases, said, strict=True):
            assert await privileged_nodes.read_again(pool, lease) == first.splitlines()[2]
        figures["adopted_s"] = time.monotonic() - began_s
        await stub.ReleaseLeases(
            environments_pb2.ReleaseLeasesRequest(lease_ids=[each.lease_id for each in leases])
        )
    return figures


def test_a_privileged_node_runs_32_containers_and_gives_nobody_else_a_right(
    kubectl: Program,
    chart_with_nodes: Mapping[str, list[Any]],
    namespace: str,
    image: str,
    start_operator: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    start_operator("operator")
    kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pool_of(image)))
    status = privileged_nodes.wait_until_ready(kubectl, namespace)
    assert (status["driver"], status["isolation"]) == ("gvisor", "Moderate")

    (node,) = privileged_nodes.node_pods(kubectl)
    broker = privileged_nodes.broker_address(kubectl, namespace)
    figures = asyncio.run(use_all(broker, node, kubectl))
    log.warning("32 containers on a privileged node: %s", figures)

    after = privileged_nodes.rights(kubectl)
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
