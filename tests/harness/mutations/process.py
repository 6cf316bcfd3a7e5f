"""A real operator beside a control plane, under the account that the chart gives it."""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.free_ports import reserve_port
from tests.support.kube import operator_process, testbeds
from tests.support.kube.operator_process import OperatorProcess
from tests.support.kube.testbeds import State

ROOT = Path(__file__).parents[3]
HOME = operator_process.NAMESPACE
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


class Running(OperatorProcess):
    """An operator that answers."""

    @property
    def troubles(self) -> list[str]:
        """Lines of its log that no operator should write, each with what follows."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [
            "\n".join(lines[at : at + 40]) for at, line in enumerate(lines) if TROUBLE.search(line)
        ]


def install(state: State, **values: Any) -> None:
    """Install the chart, CRDs included."""
    given = json.dumps({**VALUES, **values})
    words = ("upgrade", "--install", "etude", str(ROOT / "helm" / "etude"), "--namespace", HOME)
    testbeds.program(state, "helm")(*words, "--create-namespace", "-f", "-", text=given)
    crds = ("-f", str(ROOT / "helm" / "etude" / "files" / "crds"))
    testbeds.program(state, "kubectl")("wait", "--for=condition=Established", *crds)


@contextlib.contextmanager
def running(state: State, folder: Path, **changed: str) -> Iterator[Running]:
    """The operator from its start to its end, as the chart's pod would run it.

    Args:
        state: the control plane.
        folder: of its log and kubeconfig.
        changed: variables of its environment with other values.
    """
    port = reserve_port()
    kubectl = testbeds.program(state, "kubectl")
    environment = operator_process.chart_environment(
        kubectl, state, folder, pod="operator", port=port
    )
    log = folder / "operator.log"
    address = f"http://127.0.0.1:{port}"
    started = operator_process.start_operator(
        {**environment, "ETUDE_HOST": "127.0.0.1", **changed}, log, address
    )
    found = Running(started.process, log, address)
    try:
        deadline_s = time.monotonic() + READY_S
        while not found.is_ready:
            assert found.is_running, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        yield found
    finally:
        found.process.kill()
        found.process.wait(timeout=30)
