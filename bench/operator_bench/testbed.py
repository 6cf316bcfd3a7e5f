"""A control plane with KWOK, our chart on it, and processes on its network."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "hack" / "testbed" / "testbed.py"
HOME = "etude-system"
LIMIT_S = 600
"""Of one command; a busy machine gets patience."""


class Testbed(NamedTuple):
    """A running cluster."""

    state: Mapping[str, Any]

    @classmethod
    def up(cls) -> "Testbed":
        """Start one.

        Raises:
            RuntimeError: it cannot run here; the message is the driver's.
        """
        words = (sys.executable, str(DRIVER), "up", "--level", "kwok", "--owner", str(os.getpid()))
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return cls(json.loads(done.stdout))

    def down(self) -> None:
        """Take it down; nothing stays."""
        words = (sys.executable, str(DRIVER), "down", "--index", str(self.state["index"]))
        subprocess.run(words, check=True, capture_output=True, timeout=LIMIT_S)

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{self.state['node_ip']}:6443"

    @property
    def run(self) -> Path:
        """The cluster's folder."""
        return Path(self.state["run"])

    @property
    def network(self) -> tuple[str, ...]:
        """Prefix of a command that runs it on the cluster's network."""
        init = (self.run / "pid" / "init").read_text(encoding="utf-8")
        return ("nsenter", "-t", init, "-n", "--")

    def program(self, name: str, *arguments: str) -> str:
        """Run kubectl or helm as administrator; answers what it said.

        Raises:
            RuntimeError: it failed; the message is what it said.
        """
        path = str(Path(self.state["binaries"]) / name)
        environment = {**os.environ, "KUBECONFIG": str(self.state["kubeconfig"])}
        done = subprocess.run(
            (path, *arguments), check=False, capture_output=True, text=True, env=environment
        )
        if done.returncode != 0:
            raise RuntimeError(f"{name}: {done.stderr}")
        return done.stdout

    def install(self) -> None:
        """Our chart, with nobody at work yet."""
        values = {"image": "localhost/etude-base:1", "isolation.allowProcess": "true"}
        values["tls.mode"] = "Plaintext"  # controllers and brokers are played without certificates
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        chart = str(ROOT / "helm" / "etude")
        self.program("helm", "install", "etude", chart, "-n", HOME, "--create-namespace", *sets)
        self.program("kubectl", "-n", HOME, "scale", "deployment/etude-operator", "--replicas=0")
        folder = str(ROOT / "helm" / "etude" / "files" / "crds")
        self.program("kubectl", "wait", "--for=condition=Established", "-f", folder)

    def start(
        self, command: list[str], log: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """A process of ours on the cluster's network."""
        with log.open("ab") as output:
            return subprocess.Popen(
                (*self.network, *command),
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
            )

    def processor_s(self) -> dict[str, float]:
        """CPU seconds of each process of the cluster until now."""
        pids = sorted((self.run / "pid").glob("*"))
        return {path.name: processor_s(int(path.read_text(encoding="utf-8"))) for path in pids}


def processor_s(pid: int) -> float:
    """CPU seconds of a process until now."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int, field: str = "VmRSS") -> float:
    """Memory of a process: VmRSS now, VmHWM at its peak.

    Raises:
        ValueError: the kernel names no such field.
    """
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"{field} of process {pid}")
