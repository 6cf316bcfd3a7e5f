"""A real operator beside a control plane, under the account that the chart gives it."""

import contextlib
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.kube import testbeds
from tests.support.kube.testbeds import State

ROOT = Path(__file__).parents[3]
HOME = "etude-system"
READY_S = 120
VALUES: Mapping[str, Any] = {
    "image": "localhost/etude-base:1",
    "isolation": {"allowProcess": True, "seccompProfile": "etude/environment-node.json"},
    # Pods that nobody runs need no certificates, and the operator here has no sidecar.
    "tls": {"mode": "Plaintext"},
    # Tests make checkpoints as the operator does.
    "admission": {"checkpoints": False},
    # The control plane has no node: the operator is a process of this machine.
    "operator": {"replicas": 1, "nodeSelector": {"no-node": "has-this"}},
}
TROUBLE = re.compile(r"Traceback| ERROR | CRITICAL |is forbidden: User")


class Running(NamedTuple):
    """An operator that answers."""

    process: "subprocess.Popen[bytes]"
    log: Path
    port: int

    @property
    def troubles(self) -> list[str]:
        """Lines of its log that no operator should write, each with what follows."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [
            "\n".join(lines[at : at + 40]) for at, line in enumerate(lines) if TROUBLE.search(line)
        ]

    @property
    def answers(self) -> bool:
        """Whether it lives, and says so."""
        return self.process.poll() is None and _is_ready(self.port)


def install(state: State, **values: Any) -> None:
    """Install the chart, CRDs included."""
    given = json.dumps({**VALUES, **values})
    words = ("upgrade", "--install", "etude", str(ROOT / "helm" / "etude"), "--namespace", HOME)
    testbeds.program(state, "helm")(*words, "--create-namespace", "-f", "-", text=given)
    crds = ("-f", str(ROOT / "helm" / "etude" / "files" / "crds"))
    testbeds.program(state, "kubectl")("wait", "--for=condition=Established", *crds)


@contextlib.contextmanager
def running(state: State, folder: Path) -> Iterator[Running]:
    """The operator from its start to its end, as the chart's pod would run it."""
    kubectl = testbeds.program(state, "kubectl")
    found = json.loads(kubectl("-n", HOME, "get", "deployment/etude-operator", "-o", "json"))
    pod = found["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    account = pod["serviceAccountName"]
    token = kubectl("-n", HOME, "create", "token", account, "--duration=6h").strip()
    config = folder / "operator.kubeconfig"
    config.write_text(json.dumps(_kubeconfig(state, token)), encoding="utf-8")
    port = _free_port()
    given = {each["name"]: each.get("value", "") for each in container["env"]}
    own = {"ETUDE_POD": "operator", "ETUDE_NAMESPACE": HOME, "ETUDE_HOST": "127.0.0.1"}
    own |= {"ETUDE_PROBE_PORT": str(port), "KUBECONFIG": str(config)}
    command = [str(ROOT / ".venv" / "bin" / container["command"][0])]
    log = folder / "operator.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **given, **own}, stdout=out, stderr=out
        )
    try:
        deadline_s = time.monotonic() + READY_S
        while not _is_ready(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        yield Running(process, log, port)
    finally:
        process.kill()
        process.wait(timeout=30)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as reply:
            ready: bool = reply.status == 200
            return ready
    except OSError:
        return False


def _kubeconfig(state: State, token: str) -> dict[str, Any]:
    known = json.loads(Path(state["kubeconfig"]).read_text(encoding="utf-8"))
    return {
        **known,
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "operator"}}],
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
