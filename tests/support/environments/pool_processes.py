"""Broker and node as processes, by their command line."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tests.support.free_ports import reserve_port

from etude.envserver.drivers.vm import vmm_processes

START_TIMEOUT_S = 60.0


class Processes:
    """Broker and node, by their command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {
            name: reserve_port() for name in ("broker", "node", "probe-broker", "probe-node")
        }
        self.pool_file = folder / "pool.json"
        self.network: Mapping[str, object] = {"egress": "None"}
        self.lease: Mapping[str, object] = {}
        self.write_pool("Process", "Trusted")

    def add_node(self, name: str) -> str:
        """One more node, with a place of its own; returns its role."""
        role = f"node-{name}"
        self.ports |= {role: reserve_port(), f"probe-{role}": reserve_port()}
        return role

    def write_pool(self, minimum: str, trust: str, driver: str = "Auto", **template: str) -> None:
        spec = {
            "templates": [{"name": "python", "trust": trust, **template}],
            "isolation": {"minimum": minimum, "driver": driver},
            "slotsPerReplica": 4,
            "network": self.network,
            "lease": self.lease,
        }
        self.pool_file.write_text(json.dumps({"name": "demo-repos", "uid": "u", "spec": spec}))

    def environment(self, role: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "ETUDE_POOL_FILE": str(self.pool_file),
            "ETUDE_PORT": str(self.ports[role]),
            "ETUDE_PROBE_PORT": str(self.ports[f"probe-{role}"]),
            "ETUDE_POD": f"demo-repos-{role}-0",
            "ETUDE_BROKER_TARGET": f"127.0.0.1:{self.ports['broker']}",
            "ETUDE_SCRATCH": str(self.folder / role.replace("node", "scratch")),
            "ETUDE_TRACES_FILE": str(self.folder / "traces.jsonl"),
        }

    def start(self, role: str, changes: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{role}.log").open("ab") as log:
            self.running[role] = subprocess.Popen(
                [sys.executable, "-m", "etude.envserver.main", role.partition("-")[0]],
                env={**self.environment(role), **(changes or {})},
                stderr=log,
            )
        return self.running[role]

    async def ready(self, role: str) -> None:
        url = f"http://127.0.0.1:{self.ports[f'probe-{role}']}/readyz"
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await asyncio.to_thread(answers, url):
                assert self.running[role].poll() is None, self.log(role)
                await asyncio.sleep(0.05)

    def kill(self, role: str) -> None:
        self.running[role].kill()
        self.running[role].wait()

    def stop(self, role: str) -> int:
        """Tell a role to stop, as a kubelet would; returns its exit code."""
        self.running[role].terminate()
        return self.running[role].wait(START_TIMEOUT_S)

    def end_machines(self) -> None:
        """End what a node leaves for its successor, which will not come."""
        vmm_processes.kill_processes(vmm_processes.find_marked_processes(self.folder))

    def log(self, role: str) -> str:
        return (self.folder / f"{role}.log").read_text()

    def metrics(self, role: str) -> str:
        url = f"http://127.0.0.1:{self.ports[f'probe-{role}']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
