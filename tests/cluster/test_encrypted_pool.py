"""A pool on a real node whose parts prove who they are, and clients that do, or do not."""

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from cryptography import x509
from tests.cluster.test_encrypted_wire import restarts
from tests.cluster.test_machines_on_the_node import pod_ip
from tests.cluster.test_operator import eventually
from tests.support import pki
from tests.support.environments.pool_client import Pool
from tests.support.kube.short_certificates import LIFE_S, LIMIT_S, Release
from tests.support.kube.testbeds import Program

from etude.common.rpc.channels import dial
from etude.common.tls.certificate_request import (
    CertificateRequest,
    IssuerError,
    request_certificate,
)
from etude.common.tls.credentials import Credentials
from etude.common.tls.targets import named_target
from etude.common.tls.transport import PLAINTEXT, TransportSecurity, security_from_setting
from etude.v1 import environments_pb2, environments_pb2_grpc

POOL: dict[str, Any] = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "EnvPool",
    "metadata": {"name": "shared"},
    "spec": {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "isolation": {"minimum": "Process"},
        "replicas": 1,
        "slotsPerReplica": 4,
    },
}

LOOK = {"command": "ls /etc/etude-tls /var/run/etude-token 2>/dev/null; echo on"}
"""What an environment does; it finds neither the node's key nor anything to get one with."""

CLIENT: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "client"},
    "spec": {
        "schedulingGates": [{"name": "etude.dev/never"}],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "client",
                "image": "localhost/pause:1",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    },
}
"""A pod that has an account and never a machine: the test speaks in its name."""

pytestmark = [
    pytest.mark.long,  # certificates of minutes, whose end is waited for
    pytest.mark.usefixtures("crds"),
    pytest.mark.timeout(3 * LIMIT_S),
]


class Lab(NamedTuple):
    """A namespace with an encrypted pool, and a release that can be changed."""

    kubectl: Program
    home: str
    name: str
    folder: Path

    def token(self, identity: str, namespace: str) -> str:
        """What the API server gives to a pod of a namespace for an identity."""
        self.kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(CLIENT))
        bound = ("--bound-object-kind=Pod", f"--bound-object-name={CLIENT['metadata']['name']}")
        words = ("create", "token", "default", f"--audience={identity}", "--duration=10m", *bound)
        return self.kubectl("-n", namespace, *words).strip()

    def identity(self, run: str, namespace: str = "") -> str:
        return f"spiffe://etude.dev/ns/{namespace or self.name}/run/{run}/role/trainer"

    async def become(self, identity: str, namespace: str) -> TransportSecurity:
        """A certificate from the issuer, as a pod of a namespace would get it."""
        folder = self.folder / identity.removeprefix("spiffe://").replace("/", "-")
        folder.mkdir(exist_ok=True)
        token = folder / "token"
        token.write_text(await asyncio.to_thread(self.token, identity, namespace))
        ip = await asyncio.to_thread(self._issuer)
        petition = CertificateRequest(
            identity=identity,
            issuer=named_target(f"etude-issuer.{self.home}.svc", f"{ip}:7060"),
            token=token,
            trust=self._trust(),
        )
        made = pki.write(folder / "tls", await request_certificate(petition))
        return TransportSecurity(credentials=Credentials(made))

    def _issuer(self) -> str:
        label = "app.kubernetes.io/component=issuer"
        found = self.kubectl("-n", self.home, "get", "pods", "-l", label, "-o", "json")
        pods = json.loads(found)["items"]
        ips = [p["status"]["podIP"] for p in pods if "deletionTimestamp" not in p["metadata"]]
        return str(ips[-1])

    def _trust(self) -> Path:
        found = json.loads(self.kubectl("-n", self.home, "get", "secret", "etude-ca", "-o", "json"))
        folder = self.folder / "trust"
        folder.mkdir(exist_ok=True)
        for name, text in found["data"].items():
            if name.endswith(".crt"):
                (folder / name).write_bytes(base64.b64decode(text))
        return folder

    def signer(self, pod: str) -> str:
        """Name of the CA that signed what a pod shows now."""
        words = ("-n", self.name, "exec", pod, "-c", "certificates", "--")
        pem = self.kubectl(*words, "cat", "/etc/etude-tls/tls.crt")
        return x509.load_pem_x509_certificate(pem.encode()).issuer.rfc4514_string()


@pytest.fixture
def release(helm: Program, kubectl: Program, chart: str) -> Iterator[Release]:
    """The release, which is as it was afterwards."""
    made = Release(helm, kubectl, chart)
    yield made
    made.restore()


@pytest.fixture
def lab(
    kubectl: Program,
    chart: str,
    namespace: str,
    tmp_path: Path,
    release: Release,
) -> Iterator[Lab]:
    """The pool, ready."""
    if Path("/tmp") in Path(__file__).parents:
        pytest.skip("pods have a /tmp of their own over the checkout: clone it somewhere else")
    # One that is told to go may act for a moment longer, and would make a pool in the clear.
    label = ("-l", "app.kubernetes.io/component=operator", "-o", "name")
    eventually(lambda: kubectl("-n", chart, "get", "pods", *label) == "", "no operator", LIMIT_S)
    release.encrypt()
    kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(POOL))
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = json.loads(kubectl("-n", namespace, "get", "envp", "shared", "-o", "json"))
        if found.get("status", {}).get("phase") == "Ready":
            break
        assert time.monotonic() < deadline_s, found.get("status")
        time.sleep(0.5)
    yield Lab(kubectl, chart, namespace, tmp_path)
    name = CLIENT["metadata"]["name"]
    kubectl("-n", chart, "delete", "pod", name, "--ignore-not-found", "--wait=false")


def clients(broker: str, wire: TransportSecurity) -> tuple[grpc.aio.Channel, Pool]:
    channel = dial(broker, security=wire)
    stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
    return channel, Pool(stub, environments_pb2_grpc.PoolServiceStub(channel), "empty:")


async def refused(broker: str, wire: TransportSecurity) -> grpc.aio.AioRpcError:
    channel, pool = clients(broker, wire)
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pool.launch("stranger")
    return caught.value


async def test_a_pool_serves_its_namespace_and_nobody_else_while_everything_is_replaced(
    lab: Lab, namespace: str, release: Release
) -> None:
    ip = await asyncio.to_thread(pod_ip, lab.kubectl, namespace, "shared-broker-0")
    broker = named_target(f"shared-broker.{namespace}.svc", f"{ip}:7020")
    assert (
        await refused(broker, security_from_setting(PLAINTEXT))
    ).code() is grpc.StatusCode.UNAVAILABLE
    stranger = await lab.become(lab.identity("mine", lab.home), lab.home)
    error = await refused(broker, stranger)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED, error.details()
    with pytest.raises(IssuerError, match="has no identity in"):
        await lab.become(lab.identity("mine"), lab.home)

    mine = lab.identity("mine")
    wire = await lab.become(mine, namespace)
    channel, pool = clients(broker, wire)
    async with channel:
        watching = pool.watch.WatchPool(environments_pb2.WatchPoolRequest(), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError, match="that is for operator"):
            await anext(aiter(watching))
        (lease,) = await pool.launch("a")
        assert lease.endpoint.startswith("shared-node@")
        assert all("ca-1" in signer for signer in await signers(lab))
        second = asyncio.create_task(asyncio.to_thread(release.add_ca, 2))
        await turns_until_signed_anew(lab, pool, lease, wire)
        await second
    again = await asyncio.to_thread(restarts, lab.kubectl, namespace)
    assert set(again.values()) == {0}, again


async def signers(lab: Lab) -> list[str]:
    """The CAs whose certificates broker and node show."""
    return [await asyncio.to_thread(lab.signer, f"shared-{part}-0") for part in ("broker", "node")]


async def turns_until_signed_anew(
    lab: Lab, pool: Pool, lease: environments_pb2.Lease, wire: TransportSecurity
) -> None:
    """Calls to the node, one a second, until broker and node have certificates of the second CA.

    None of them may fail. Our own certificate is replaced meanwhile, as a keeper would.
    """
    deadline_s, turns, renewed_s = time.monotonic() + LIMIT_S, 0, time.monotonic()
    assert wire.credentials is not None
    nodes = dial(lease.endpoint, security=wire)
    stub = environments_pb2_grpc.EnvNodeServiceStub(nodes)
    async with nodes:
        while True:
            turns += 1
            call = environments_pb2.ToolCall(
                call_id=str(turns), name="run_terminal", arguments_json=json.dumps(LOOK)
            )
            request = environments_pb2.RunTurnRequest(
                lease_id=lease.lease_id, agent_token=lease.agent_token, calls=[call]
            )
            answer = await stub.RunTurn(request, timeout=60)
            assert answer.results[0].content.decode().strip() == "on"
            await pool.broker.RenewLeases(
                environments_pb2.RenewLeasesRequest(lease_ids=[lease.lease_id]), timeout=60
            )
            if time.monotonic() - renewed_s > LIFE_S / 3:
                await lab.become(wire.credentials.identity.uri, lab.name)
                renewed_s = time.monotonic()
                now = await signers(lab)
                if all("ca-2" in signer for signer in now):
                    return
                assert time.monotonic() < deadline_s, now
            await asyncio.sleep(1)
