"""QEMU VMs on the chart's privileged node: a private store, a revoked rule, a daemon, and a pod."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.environments.pool_client import Pool
from tests.support.kube import privileged_nodes
from tests.support.kube.privileged_nodes import LIMIT_S, NODES
from tests.support.kube.testbeds import Program
from tests.support.vm import microvms

from etude.common.rpc import channels
from etude.envserver.drivers.vm.qemu.command_line import PROGRAM
from etude.v1 import environments_pb2, environments_pb2_grpc

ROOT = Path(__file__).parents[2]
SLOTS = 32
SHOP = "93.184.215.14"
"""A public address, which the node's pod gets for itself: nothing leaves it."""
SERVER = """
import http.server, time
class Shop(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")
        while self.path == "/endless":
            self.wfile.write(b".")
            self.wfile.flush()
            open("/tmp/served", "a").write("x")
            time.sleep(0.1)
http.server.ThreadingHTTPServer(("%s", 80), Shop).serve_forever()
"""
ASK = "printf 'GET http://%s%s HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n' | nc 127.0.0.1 3128"

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.usefixtures("crds"),
    pytest.mark.timeout(4 * LIMIT_S),
    pytest.mark.long,
]

Store = Mapping[str, str]


@pytest.fixture
def image(store: Store) -> str:
    """What a template names an image by that lies in a private store."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed: `make system-deps` installs it")
    if Path("/tmp") in ROOT.parents:
        pytest.skip("pods have a /tmp of their own over the checkout: clone it somewhere else")
    push = ("push", microvms.small_image().address, "s3://etude/images")
    words = (sys.executable, "-m", "etude.envserver.images.command", *push)
    done = subprocess.run(
        (*words, "--endpoint", store["endpoint"]),
        env={**os.environ, **keys_of(store)},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def keys_of(store: Store) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": store["access_key"], "AWS_SECRET_ACCESS_KEY": store["secret_key"]}


@pytest.fixture
def nodes(kubectl: Program, helm: Program, chart: str, namespace: str) -> Iterator[None]:
    """The release with a privileged node for the pool."""
    privileged_nodes.make_namespace(kubectl)
    node = {"namespace": namespace, "name": "machines", "slots": SLOTS, "slotMilliCpu": 5}
    node |= {"slotMemoryMib": 128, "slotDiskMib": 128}
    given = {"namespace": NODES, "pools": [node], "drainSeconds": 150}
    privileged_nodes.upgrade(kubectl, helm, chart, given)
    yield
    privileged_nodes.remove_nodes(kubectl, helm, chart)


def host_of(name: str, namespace: str) -> str:
    return f"{name}.{namespace}.svc.cluster.local"


def pool_of(image: str, store: Store, *hosts: str) -> dict[str, Any]:
    allowed = [
        {"name": host.partition(".")[0], "host": host, "port": 80, "mode": "Http"} for host in hosts
    ]
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "machines"},
        "spec": {
            "templates": [{"name": "python", "trust": "Trusted", "image": image}],
            "isolation": {"minimum": "Process", "driver": "QemuMicroVM"},
            "replicas": 1,
            "slotsPerReplica": SLOTS,
            "slot": {"cpu": "5m", "memoryMib": 256},
            "network": {"egress": "Custom", "rules": allowed},
            "store": {
                "endpoint": store["endpoint"],
                "region": "us-east-1",
                "secretRef": {"name": "s3"},
            },
            "brokers": 1,
        },
    }


def test_vms_of_a_private_store_go_on_through_a_rule_a_daemon_and_a_pod_that_go(
    kubectl: Program,
    namespace: str,
    nodes: None,
    store: Store,
    image: str,
    start_operator: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    task = Path(store["folder"]) / "tasks/fix/environment"
    task.mkdir(parents=True)
    (task / "greet.sh").write_text("echo hello")
    literals = [f"--from-literal={name}={value}" for name, value in keys_of(store).items()]
    kubectl("-n", namespace, "create", "secret", "generic", "s3", *literals)
    start_operator("operator")
    shop, files = (host_of(name, namespace) for name in ("shop", "files"))
    whole = pool_of(image, store, shop, files)
    kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(whole))
    status = privileged_nodes.wait_until_ready(kubectl, namespace)
    assert (status["driver"], status["isolation"]) == ("qemu-microvm", "Weak")
    (node,) = privileged_nodes.node_pods(kubectl)
    assert "AWS" not in privileged_nodes.on_node(kubectl, node, "cat /proc/[0-9]*/environ || true")
    serve_shop(kubectl, namespace, node)

    def revoke() -> None:
        left = pool_of(image, store, files)
        kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(left))

    broker = privileged_nodes.broker_address(kubectl, namespace)
    figures = asyncio.run(use_all(broker, node, kubectl, Egress(shop, files, revoke)))
    log.warning("%d VMs on a privileged node: %s", SLOTS, figures)


class Egress(NamedTuple):
    """A host whose rule goes, one whose rule stays, and how it goes."""

    revoked: str
    kept: str
    revoke: Callable[[], None]


def serve_shop(kubectl: Program, namespace: str, node: str) -> None:
    """A server on a public address of the node's pod's own, under two names of the cluster."""
    for name in ("shop", "files"):
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"clusterIP": "None", "ports": [{"port": 80}]},
        }
        places = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4",
            "ports": [{"port": 80}],
            "endpoints": [{"addresses": [SHOP], "conditions": {"ready": True}}],
        }
        for each in (service, places):
            kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(each))
    script = f"ip addr add {SHOP}/32 dev lo; cat > /tmp/shop.py <<'END'\n{SERVER % SHOP}\nEND"
    privileged_nodes.on_node(kubectl, node, script)

    def serve() -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):  # it ends with the pod
            privileged_nodes.on_node(kubectl, node, "exec python /tmp/shop.py")

    threading.Thread(target=serve, daemon=True).start()
    answers = f"for i in $(seq 100); do nc -w 1 {SHOP} 80 < /dev/null && exit 0; sleep 0.1; done"
    privileged_nodes.on_node(kubectl, node, f"{answers}; exit 1")


async def use_all(broker: str, node: str, kubectl: Program, egress: Egress) -> dict[str, float]:
    """Use every slot at once, through all that befalls the node."""
    figures = {}
    async with channels.dial(broker) as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        uri = "s3://etude/tasks/fix/environment"
        pool = Pool(stub, environments_pb2_grpc.PoolServiceStub(channel), uri)
        pool.deadline_s = LIMIT_S
        began_s = time.monotonic()
        leases = await pool.launch("a", SLOTS, ttl_seconds=1_800)
        write = {"command": "sh greet.sh; uname -n > mine"}
        said = await asyncio.gather(
            *(pool.turn(lease, ("1", "run_terminal", write)) for lease in leases)
        )
        figures["first_call_s"] = time.monotonic() - began_s
        assert {each[0].strip() for each in said} == {"hello"}

        figures["cut_s"] = await see_rule_go(pool, leases[0], kubectl, node, egress)

        privileged_nodes.kill_daemon(kubectl, node)
        began_s = time.monotonic()
        for lease in leases:
            assert (await privileged_nodes.read_again(pool, lease)).strip() == lease.lease_id
        figures["adopted_s"] = time.monotonic() - began_s
        await see_pod_go(pool, leases, kubectl, node)
    return figures


async def see_rule_go(
    pool: Pool,
    lease: environments_pb2.Lease,
    kubectl: Program,
    node: str,
    egress: Egress,
) -> float:
    """Seconds from a rule's end in the EnvPool to the end of what was open under it."""
    endless = ASK % (egress.revoked, "/endless")
    reads = {"command": f"{endless} | tail -c 200; echo; echo cut"}
    reading = asyncio.create_task(pool.turn(lease, ("endless", "run_terminal", reads)))
    served = "cat /tmp/served 2>/dev/null || true"
    deadline_s = time.monotonic() + 60
    while not await asyncio.to_thread(privileged_nodes.on_node, kubectl, node, served):
        assert time.monotonic() < deadline_s
        assert not reading.done(), await reading
    await asyncio.to_thread(egress.revoke)
    began_s = time.monotonic()
    (said,) = await reading
    cut_s = time.monotonic() - began_s
    assert said.split()[-1] == "cut", said
    for host, found in ((egress.revoked, " 403 "), (egress.kept, "hello")):
        ask = {"command": ASK % (host, "/")}
        (answer,) = await pool.turn(lease, (f"to-{host[:5]}", "run_terminal", ask))
        assert found in answer
    return cut_s


async def see_pod_go(
    pool: Pool, leases: list[environments_pb2.Lease], kubectl: Program, node: str
) -> None:
    """A pod that is deleted serves its leases until they end, and its successor all others."""
    await asyncio.to_thread(kubectl, "-n", NODES, "delete", "pod", node, "--wait=false")
    report = environments_pb2.WatchPoolRequest()
    async with asyncio.timeout(LIMIT_S):
        async for state in pool.watch.WatchPool(report):
            if not state.nodes:  # it offers no slot any more
                break
    for lease in (leases[0], leases[-1]):
        found = await privileged_nodes.read_again(pool, lease)
        assert found.strip() == lease.lease_id
    began_s = time.monotonic()
    release = environments_pb2.ReleaseLeasesRequest(lease_ids=[each.lease_id for each in leases])
    await pool.broker.ReleaseLeases(release, timeout=LIMIT_S)
    gone = ("wait", "--for=delete", f"pod/{node}", f"--timeout={LIMIT_S}s")
    await asyncio.to_thread(kubectl, "-n", NODES, *gone)
    log.warning("the pod was gone %.1f s after its last lease", time.monotonic() - began_s)
    (lease,) = await pool.launch("after", queue_timeout_seconds=LIMIT_S)
    assert await pool.turn(lease, ("1", "run_terminal", {"command": "sh greet.sh"})) == ["hello"]
    release = environments_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id])
    await pool.broker.ReleaseLeases(release, timeout=LIMIT_S)
