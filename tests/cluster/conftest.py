"""A real cluster for the tests here; without one they skip and say why."""

import atexit
import http.client
import json
import os
import ssl
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "hack" / "testbed" / "testbed.py"
UNAVAILABLE = 69
UP_LIMIT_S = 300
"""Five seconds on an idle machine; a busy one gets patience."""


class Reply(NamedTuple):
    """What the API server answered."""

    status: int
    body: dict[str, Any]


@pytest.fixture(scope="session")
def testbed() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The driver's commands: `testbed("restart", "etcd", …)`."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = (sys.executable, str(DRIVER), *arguments)
        return subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=UP_LIMIT_S
        )

    return run


@pytest.fixture(scope="session")
def cluster(
    testbed: Callable[..., subprocess.CompletedProcess[str]],
) -> Iterator[Mapping[str, Any]]:
    """A control plane and a node of this test run's own, with our CRDs installed."""
    started = testbed("up", "--level", "node", "--owner", str(os.getpid()))
    if started.returncode == UNAVAILABLE and os.environ.get("ETUDE_REQUIRE") != "cluster":
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    state: Mapping[str, Any] = json.loads(started.stdout)

    def stop() -> None:
        testbed("down", "--index", str(state["index"]))

    atexit.register(stop)  # also when a fixture below fails while it is being set up
    yield state
    stop()
    atexit.unregister(stop)


@pytest.fixture(scope="session")
def kubectl(cluster: Mapping[str, Any]) -> Callable[..., str]:
    """Run kubectl as administrator; a failure is an AssertionError with what it said.

    With `fails=True` a failure is what is wanted, and its message is the answer.
    """
    program = str(Path(cluster["binaries"]) / "kubectl")

    def run(*arguments: str, text: str | None = None, fails: bool = False) -> str:
        words = (program, "--kubeconfig", cluster["kubeconfig"], *arguments)
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, input=text, timeout=120
        )
        assert (done.returncode != 0) == fails, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stderr if fails else done.stdout

    return run


@pytest.fixture(scope="session")
def helm(cluster: Mapping[str, Any]) -> Callable[..., str]:
    """Run helm as administrator, as `kubectl` above."""
    program = str(Path(cluster["binaries"]) / "helm")
    environment = {**os.environ, "KUBECONFIG": cluster["kubeconfig"]}

    def run(*arguments: str, fails: bool = False) -> str:
        done = subprocess.run(
            (program, *arguments),
            check=False,
            capture_output=True,
            text=True,
            env=environment,
            timeout=180,
        )
        assert (done.returncode != 0) == fails, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stderr if fails else done.stdout

    return run


@pytest.fixture(scope="session")
def crds(kubectl: Callable[..., str]) -> None:
    """Our CRDs, established."""
    folder = ROOT / "helm" / "etude" / "files" / "crds"
    kubectl("apply", "--server-side", "-f", str(folder))
    kubectl("wait", "--for=condition=Established", "-f", str(folder), "--timeout=60s")


@pytest.fixture
def namespace(kubectl: Callable[..., str]) -> Iterator[str]:
    """A fresh namespace that refuses pods below the restricted standard."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
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
