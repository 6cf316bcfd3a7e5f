"""A real cluster for the tests here; without one they skip and say why."""

import http.client
import json
import os
import ssl
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.cut_demo import make_data
from tests.support.free_ports import reserve_port
from tests.support.kube import testbeds

ROOT = Path(__file__).parents[2]
# Tests dial pods by their addresses, in the clear as the chart below is installed.
os.environ.setdefault("ETUDE_TLS", "Plaintext")


class Reply(NamedTuple):
    """What the API server answered."""

    status: int
    body: dict[str, Any]


@pytest.fixture(scope="session")
def testbed() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The driver's commands: `testbed("restart", "etcd", …)`."""
    return testbeds.driver


@pytest.fixture(scope="session")
def cluster() -> Iterator[Mapping[str, Any]]:
    """A control plane and a node of this test run's own, with our CRDs installed."""
    yield from testbeds.cluster("node")


@pytest.fixture(scope="session")
def kubectl(cluster: Mapping[str, Any]) -> Callable[..., str]:
    """Run kubectl as administrator: see `testbeds.program`."""
    return testbeds.program(cluster, "kubectl")


@pytest.fixture(scope="session")
def helm(cluster: Mapping[str, Any]) -> Callable[..., str]:
    """Run helm as administrator, as `kubectl` above."""
    return testbeds.program(cluster, "helm")


@pytest.fixture(scope="module")
def plane() -> Iterator[Mapping[str, Any]]:
    """A control plane alone, for tests that install the chart as they like; it has no node."""
    yield from testbeds.cluster("apiserver")


@pytest.fixture(scope="session")
def chart(kubectl: Callable[..., str], helm: Callable[..., str]) -> str:
    """Our chart as a release; the answer is its namespace. No operator runs yet."""
    home = "etude-system"
    kubectl("create", "namespace", home)
    kubectl("label", "namespace", home, "pod-security.kubernetes.io/enforce=restricted")
    values = {
        "image": "localhost/etude-base:1",
        "isolation.allowProcess": "true",
        "isolation.seccompProfile": "etude/environment-node.json",
        # Operators that are processes here have no sidecar; test_encrypted_wire.py is about it.
        "tls.mode": "Plaintext",
    }
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    helm("install", "etude", str(ROOT / "helm" / "etude"), "--namespace", home, *sets)
    kubectl("-n", home, "scale", "deployment/etude-operator", "--replicas=0")
    return home


@pytest.fixture(scope="session")
def crds(kubectl: Callable[..., str], chart: str) -> None:
    """Our CRDs, served: an API server refuses calls while it sets up their store."""
    assert chart
    folder = ROOT / "helm" / "etude" / "files" / "crds"
    kubectl("wait", "--for=condition=Established", "-f", str(folder), "--timeout=60s")
    testbeds.wait_until_listed(kubectl, "rlruns", "envpools", "checkpoints")


@pytest.fixture
def start_operator(
    cluster: Mapping[str, Any], kubectl: Callable[..., str], chart: str, tmp_path: Path
) -> Iterator[Callable[[str], "subprocess.Popen[bytes]"]]:
    """Start an operator by name, as the chart's pod would: its environment, its account.

    It is a process on this machine, so that a test can kill it at any moment; its log is
    `<name>.log` in tmp_path. All of them are gone after the test.
    """
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> "subprocess.Popen[bytes]":
        port = reserve_port()
        found = json.loads(kubectl("-n", chart, "get", "deployment/etude-operator", "-o", "json"))
        (container,) = found["spec"]["template"]["spec"]["containers"]
        given = {each["name"]: each.get("value", "") for each in container["env"]}
        account = found["spec"]["template"]["spec"]["serviceAccountName"]
        token = kubectl("-n", chart, "create", "token", account, "--duration=1h").strip()
        config = tmp_path / f"{name}.kubeconfig"
        config.write_text(json.dumps(kubeconfig(cluster, token)))
        own = {"ETUDE_POD": name, "ETUDE_NAMESPACE": chart, "ETUDE_HOST": "127.0.0.1"}
        own |= {"ETUDE_PROBE_PORT": str(port), "KUBECONFIG": str(config)}
        command = [str(ROOT / ".venv" / "bin" / container["command"][0])]
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **given, **own}, stdout=log, stderr=log
            )
        running.append(process)
        wait_for_http("127.0.0.1", port, "/readyz", 60)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait(timeout=30)


def kubeconfig(cluster: Mapping[str, Any], token: str) -> dict[str, Any]:
    """How one account reaches the cluster."""
    known = json.loads(Path(cluster["kubeconfig"]).read_text(encoding="utf-8"))
    return {
        **known,
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "operator"}}],
    }


@pytest.fixture(scope="session")
def store(
    cluster: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, str]]:
    """An S3 server beside the cluster, which pods reach; its bucket `etude` is a folder here."""
    folder = tmp_path_factory.mktemp("s3")
    (folder / "etude").mkdir()
    address = f"{cluster['host_ip']}:7070"
    keys = {"ROOT_ACCESS_KEY": "cluster-test", "ROOT_SECRET_KEY": uuid.uuid4().hex}
    program = str(Path(cluster["binaries"]) / "versitygw")
    words = (program, "--quiet", "--port", address, "--health", "/health", "posix", str(folder))
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(words, env={**os.environ, **keys}, stdout=log, stderr=log)
    try:
        wait_for_http(cluster["host_ip"], 7070, "/health")
        yield {
            "folder": str(folder / "etude"),
            "endpoint": f"http://{address}",
            "access_key": keys["ROOT_ACCESS_KEY"],
            "secret_key": keys["ROOT_SECRET_KEY"],
        }
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for_http(host: str, port: int, path: str, limit_s: float = 30) -> None:
    deadline_s = time.monotonic() + limit_s
    while True:
        connection = http.client.HTTPConnection(host, port, timeout=2)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        except OSError:
            assert time.monotonic() < deadline_s, f"http://{host}:{port}{path} does not answer"
            time.sleep(0.1)
        finally:
            connection.close()


@pytest.fixture
def namespace(kubectl: Callable[..., str]) -> Iterator[str]:
    """A fresh namespace that refuses pods below the restricted standard, and trusts its pools."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    labels = ("pod-security.kubernetes.io/enforce=restricted", "etude.dev/weak-isolation=allow")
    kubectl("label", "namespace", name, *labels)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def api(cluster: Mapping[str, Any]) -> Iterator[Callable[..., Reply]]:
    """The API server by HTTP, for many requests: `api("POST", path, body)`."""
    pki = Path(cluster["run"]) / "pki"
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    connection = http.client.HTTPSConnection(cluster["node_ip"], 6443, timeout=30, context=context)

    def call(method: str, path: str, body: object = None) -> Reply:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return Reply(response.status, json.loads(response.read()))

    yield call
    connection.close()


@pytest.fixture(scope="session")
def demo_data(store: Mapping[str, str]) -> None:
    """Model, tasks and transcripts of the demo, in the bucket that pods read."""
    make_data(store)


@pytest.fixture
def operator_pod(kubectl: Callable[..., str], chart: str) -> Iterator[None]:
    """The chart's own Deployment, available."""
    if Path("/tmp") in ROOT.parents:
        pytest.skip("pods have a /tmp of their own over the checkout: clone it somewhere else")
    kubectl("-n", chart, "scale", "deployment/etude-operator", "--replicas=1")
    kubectl("-n", chart, "rollout", "status", "deployment/etude-operator", "--timeout=180s")
    yield
    kubectl("-n", chart, "scale", "deployment/etude-operator", "--replicas=0")


@pytest.fixture
def lab(kubectl: Callable[..., str], namespace: str, store: Mapping[str, str]) -> str:
    """A namespace with the Secret that the manifests below name."""
    keys = {"AWS_ACCESS_KEY_ID": store["access_key"], "AWS_SECRET_ACCESS_KEY": store["secret_key"]}
    literals = [f"--from-literal={name}={value}" for name, value in keys.items()]
    kubectl("-n", namespace, "create", "secret", "generic", "s3", *literals)
    return namespace
