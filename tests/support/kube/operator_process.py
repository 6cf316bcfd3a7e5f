"""Operator as a process beside a test cluster, with the environment and account of the chart."""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.kube.testbeds import Program, State

ROOT = Path(__file__).parents[3]
COMMAND = str(ROOT / ".venv" / "bin" / "etude-operator")
NAMESPACE = "etude-system"
LIMIT_S = 60


@dataclass(slots=True)
class OperatorProcess:
    """One operator that was started."""

    process: "subprocess.Popen[bytes]"
    log: Path
    address: str
    """Of its probes and metrics."""

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """True if it runs and its readiness probe succeeds."""
        if not self.is_running:
            return False
        try:
            with urllib.request.urlopen(f"{self.address}/readyz", timeout=30) as reply:
                ready: bool = reply.status == 200
                return ready
        except OSError:
            return False

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it, and wait for its end.

        Raises:
            TimeoutExpired: it did not end after the signal; it was killed.
        """
        self.process.send_signal(number)
        try:
            self.process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=LIMIT_S)
            raise


def start_operator(
    environment: Mapping[str, str], log: Path, address: str, *, prefix: tuple[str, ...] = ()
) -> OperatorProcess:
    """Start an operator; `prefix` is a program that runs it, as nsenter(1) does."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            (*prefix, COMMAND), env={**os.environ, **environment}, stdout=output, stderr=output
        )
    return OperatorProcess(process, log, address)


def chart_environment(
    kubectl: Program, state: State, folder: Path, *, pod: str, port: int
) -> dict[str, str]:
    """Environment of the operator's container, and a kubeconfig with its account in the folder."""
    words = ("-n", NAMESPACE, "get", "deployment/etude-operator", "-o", "json")
    spec = json.loads(kubectl(*words))["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    account = spec["serviceAccountName"]
    token = kubectl("-n", NAMESPACE, "create", "token", account, "--duration=6h").strip()
    known = json.loads(Path(state["kubeconfig"]).read_text(encoding="utf-8"))
    config = folder / "operator.kubeconfig"
    write_kubeconfig(config, known["clusters"][0]["cluster"], token=token)
    given = {each["name"]: each.get("value", "") for each in container["env"]}
    return given | {
        "ETUDE_POD": pod,
        "ETUDE_NAMESPACE": NAMESPACE,
        "ETUDE_PROBE_PORT": str(port),
        "KUBECONFIG": str(config),
    }


def write_kubeconfig(path: Path, cluster: Mapping[str, Any], *, token: str) -> None:
    """Write a kubeconfig of one cluster and one account."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "operator",
        "clusters": [{"name": "cluster", "cluster": dict(cluster)}],
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "operator", "context": {"cluster": "cluster", "user": "operator"}}],
    }
    path.write_text(json.dumps(config), encoding="utf-8")
