"""Privileged nodes whose parts prove who they are: their own pool, and no other."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.cluster.test_encrypted_pool import POOL, Lab, clients
from tests.cluster.test_machines_on_the_node import pod_ip
from tests.cluster.test_operator import eventually
from tests.support.kube import privileged_nodes
from tests.support.kube.privileged_nodes import NODES
from tests.support.kube.short_certificates import LIMIT_S, Release
from tests.support.kube.testbeds import Program

from etude.common.rpc.channels import dial
from etude.common.tls.certificate_request import IssuerError
from etude.common.tls.targets import named_target
from etude.v1 import environments_pb2, environments_pb2_grpc

pytestmark = [
    pytest.mark.long,  # two upgrades of the release
    pytest.mark.usefixtures("crds"),
    pytest.mark.timeout(3 * LIMIT_S),
]


@pytest.fixture
def lab(
    kubectl: Program, helm: Program, chart: str, namespace: str, tmp_path: Path
) -> Iterator[Lab]:
    """A pool of processes on a privileged node, ready."""
    if Path("/tmp") in Path(__file__).parents:
        pytest.skip("pods have a /tmp of their own over the checkout: clone it somewhere else")
    label = ("-l", "app.kubernetes.io/component=operator", "-o", "name")
    eventually(lambda: kubectl("-n", chart, "get", "pods", *label) == "", "no operator", LIMIT_S)
    release = Release(helm, kubectl, chart)
    release.encrypt()
    privileged_nodes.make_namespace(kubectl)
    node = {"namespace": namespace, "name": "shared", "slots": 4, "slotMilliCpu": 5}
    node |= {"slotMemoryMib": 64, "slotDiskMib": 64}
    nodes = {"namespace": NODES, "pools": [node], "drainSeconds": 60}
    privileged_nodes.upgrade(kubectl, helm, chart, nodes, has_operator=True)
    for name in ("issuer", "operator"):
        words = ("rollout", "status", f"deployment/etude-{name}", f"--timeout={LIMIT_S}s")
        kubectl("-n", chart, *words)
    kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(POOL))
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = json.loads(kubectl("-n", namespace, "get", "envp", "shared", "-o", "json"))
        if found.get("status", {}).get("phase") == "Ready":
            break
        assert time.monotonic() < deadline_s, found.get("status")
        time.sleep(0.5)
    yield Lab(kubectl, chart, namespace, tmp_path)
    privileged_nodes.remove_nodes(kubectl, helm, chart)
    release.restore()


async def test_a_privileged_node_is_of_its_pool_alone_and_takes_calls_of_its_namespace(
    lab: Lab, namespace: str
) -> None:
    ip = await asyncio.to_thread(pod_ip, lab.kubectl, namespace, "shared-broker-0")
    broker = named_target(f"shared-broker.{namespace}.svc", f"{ip}:7020")
    wire = await lab.become(lab.identity("mine"), namespace)
    channel, pool = clients(broker, wire)
    async with channel:
        (lease,) = await pool.launch("a")
        assert lease.endpoint.startswith("shared-node@")
        call = environments_pb2.ToolCall(
            call_id="1", name="run_terminal", arguments_json='{"command": "echo on"}'
        )
        turn = environments_pb2.RunTurnRequest(
            lease_id=lease.lease_id, agent_token=lease.agent_token, calls=[call]
        )
        async with dial(lease.endpoint, security=wire) as nodes:
            answer = await environments_pb2_grpc.EnvNodeServiceStub(nodes).RunTurn(turn, timeout=60)
            assert answer.results[0].content.decode().strip() == "on"
        reads = environments_pb2.GrantReadsRequest(uri="s3://etude/tasks")
        with pytest.raises(grpc.aio.AioRpcError, match=r"that is for node \(pool\)"):
            await pool.broker.GrantReads(reads, timeout=60)

    def of(pool: str, role: str) -> str:
        return f"spiffe://etude.dev/ns/{namespace}/pool/{pool}/role/{role}"

    own = await lab.become(of("shared", "node"), NODES)
    channel, pool = clients(broker, own)
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError, match="is below no prefix"):
            await pool.broker.GrantReads(reads, timeout=60)
    for identity in (of("shared", "broker"), of("other", "node")):
        with pytest.raises(IssuerError):
            await lab.become(identity, NODES)
    client = ("delete", "pod", "client", "--ignore-not-found", "--wait=false")
    await asyncio.to_thread(lab.kubectl, "-n", NODES, *client)
