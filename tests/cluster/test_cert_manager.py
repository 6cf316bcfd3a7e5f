"""The operator of a cluster with cert-manager, which a stand-in plays, and a controller.

The cluster has no node: the controller's server runs here, at the address that its pod is given.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.cluster import conftest
from tests.cluster.test_operator import RUN, eventually, get
from tests.support import pki
from tests.support.free_ports import reserve_port
from tests.support.kube import testbeds
from tests.support.kube.cert_manager import CertManager, mounted
from tests.support.kube.testbeds import Program

from etude.common.api.kinds import RLRun
from etude.common.rpc.server import Server
from etude.common.tls.credentials import Credentials
from etude.common.tls.identity import Identity
from etude.common.tls.transport import TransportSecurity
from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.reports import NAME, RunReports, RunService
from etude.v1 import run_pb2, run_pb2_grpc

ROOT = Path(__file__).parents[2]
HOME, LAB = "etude-system", "lab"
ADDRESS = "127.77.0.1"
"""Of the controller's pod: the whole of 127.0.0.0/8 is this machine."""
PATIENCE_S = 120


class Place(NamedTuple):
    """A cluster with the chart, a stand-in and an operator."""

    kubectl: Program
    manager: CertManager
    folder: Path

    def put(self, namespace: str, secret: str) -> Path:
        """What a pod with this Secret would find, and finds again when it was replaced."""
        return pki.write(self.folder / secret, mounted(self.kubectl, namespace, secret))

    @property
    def said(self) -> str:
        """The operator's log."""
        return (self.folder / "operator.log").read_text(encoding="utf-8")


@pytest.fixture
def place(plane: Mapping[str, Any], tmp_path: Path) -> Iterator[Place]:
    kubectl, helm = (testbeds.program(plane, name) for name in ("kubectl", "helm"))
    manager = CertManager(kubectl)
    manager.install()
    values = {
        "image": "localhost/etude:1",
        "operator": {"nodeSelector": {"no-node": "has-this"}},
        "tls": {"mode": "CertManager", "issuerRef": {"name": "test"}},
    }
    words = ("install", "etude", str(ROOT / "helm" / "etude"), "-n", HOME, "--create-namespace")
    helm(*words, "-f", "-", text=json.dumps(values))
    kubectl("create", "namespace", LAB)
    manager.sign(HOME)
    made = Place(kubectl, manager, tmp_path)
    process = operator(plane, made)
    yield made
    process.kill()
    process.wait(timeout=30)


def operator(plane: Mapping[str, Any], place: Place) -> "subprocess.Popen[bytes]":
    """The operator as the chart's pod would run it, with the certificate of its Secret."""
    found = get(place.kubectl, HOME, "deployment/etude-operator")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each.get("value", "") for each in container["env"]}
    assert given["ETUDE_TLS"] == "/etc/etude-tls"
    token = place.kubectl("-n", HOME, "create", "token", "etude-operator", "--duration=1h").strip()
    config = place.folder / "kubeconfig"
    config.write_text(json.dumps(conftest.kubeconfig(plane, token)))
    port = reserve_port()
    own = {"ETUDE_POD": "one", "ETUDE_NAMESPACE": HOME, "ETUDE_HOST": "127.0.0.1"}
    own |= {"ETUDE_PROBE_PORT": str(port), "KUBECONFIG": str(config)}
    own |= {"ETUDE_TLS": str(place.put(HOME, "etude-operator-tls"))}
    with (place.folder / "operator.log").open("ab") as log:
        process = subprocess.Popen(
            [str(ROOT / ".venv" / "bin" / "etude-operator")],
            env={**os.environ, **given, **own},
            stdout=log,
            stderr=log,
        )
    conftest.wait_for_http("127.0.0.1", port, "/readyz", PATIENCE_S)
    return process


@asynccontextmanager
async def controller(folder: Path, reports: RunReports, run: RLRun) -> AsyncIterator[None]:
    """A controller with the certificate of a folder, at its pod's address."""
    wire = TransportSecurity(credentials=Credentials(folder))
    server = Server([NAME], host=ADDRESS, port=7000, security=wire)
    service = RunService(reports, RunCommands(run.spec, 1))
    run_pb2_grpc.add_RunServiceServicer_to_server(service, server.grpc_server)
    await server.start()
    await server.set_ready()
    try:
        yield
    finally:
        await server.stop(0)


async def seen(holds: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(eventually, holds, what, PATIENCE_S)


def tell(reports: RunReports, step: int) -> None:
    """The controller finished a step."""
    reports.status.step = step
    reports.set_state(run_pb2.RUN_STATE_RUNNING)
    reports.mark_changed()


def told(kubectl: Program, step: int) -> Callable[[], bool]:
    """Whether the operator has heard of it."""

    def is_told() -> bool:
        status = get(kubectl, LAB, "rlr", "demo").get("status", {})
        return bool(status.get("step", {}).get("current") == step)

    return is_told


async def test_the_operator_hears_whoever_has_the_certificate_that_it_asked_for(
    place: Place,
) -> None:
    kubectl, manager = place.kubectl, place.manager
    run = await asyncio.to_thread(started, kubectl)
    asked = {each["metadata"]["name"]: each for each in manager.certificates(LAB)}
    owner = asked["demo-trainer-tls"]["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"]) == ("RLRun", run.metadata.uid)
    await asyncio.to_thread(manager.sign, LAB)
    reports = RunReports(run.metadata.uid, 1)
    reports.status.phase, reports.status.target_step = "sft", 10
    tell(reports, 3)
    other = Identity(domain="etude.dev", namespace=LAB, run="other", role="trainer")
    impostor = pki.write(place.folder / "impostor", manager.authority.issue(other))
    async with controller(impostor, reports, run):
        await seen(lambda: f"not good for demo-trainer.{LAB}.svc" in place.said, "a refusal")
        assert not told(kubectl, 3)()
    folder = await asyncio.to_thread(place.put, LAB, "demo-trainer-tls")
    async with controller(folder, reports, run):
        await seen(told(kubectl, 3), "step 3")
        for namespace, secret in ((HOME, "etude-operator-tls"), (LAB, "demo-trainer-tls")):
            await asyncio.to_thread(manager.sign, namespace)
            await asyncio.to_thread(place.put, namespace, secret)
        tell(reports, 4)
        await seen(told(kubectl, 4), "step 4, on the stream that was open")
    async with controller(folder, reports, run):
        tell(reports, 5)
        await seen(told(kubectl, 5), "step 5, after a handshake with both new certificates")
    assert "Traceback" not in place.said


def started(kubectl: Program) -> RLRun:
    """The run, and its controller's pod as if a kubelet had started it."""
    kubectl("-n", LAB, "apply", "-f", "-", text=json.dumps(RUN))
    eventually(lambda: "demo-trainer-0" in kubectl("-n", LAB, "get", "pods"), "a pod", PATIENCE_S)
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}]}
    patch = json.dumps({"status": {**status, "conditions": ready}})
    words = ("-n", LAB, "patch", "pod", "demo-trainer-0", "--subresource=status", "--type=merge")
    kubectl(*words, "-p", patch)
    return RLRun.model_validate(get(kubectl, LAB, "rlr", "demo"))
