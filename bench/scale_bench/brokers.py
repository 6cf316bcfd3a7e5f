"""Brokers of one pool as processes."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from broker_bench.processes import free_port, process_cpu_s


@dataclass(slots=True)
class BrokerProcesses:
    """Real brokers, started as the operator starts them."""

    folder: Path
    count: int
    slots: int
    ports: list[int] = field(default_factory=list)
    _processes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lease = {"maxQueue": 100_000, "ttlSeconds": 120}
        spec = {"templates": [{"name": "python"}], "slotsPerReplica": self.slots, "lease": lease}
        pool = {"name": "bench", "uid": "u", "spec": spec}
        (self.folder / "pool.json").write_text(json.dumps(pool))
        self.ports += [free_port() for _ in range(2 * self.count)]

    @property
    def targets(self) -> list[str]:
        """Where each broker listens."""
        return [f"127.0.0.1:{port}" for port in self.ports[: self.count]]

    def start(self, index: int) -> None:
        """Start one broker."""
        environment = {
            "PATH": os.environ["PATH"],
            "ETUDE_POOL_FILE": str(self.folder / "pool.json"),
            "ETUDE_PORT": str(self.ports[index]),
            "ETUDE_PROBE_PORT": str(self.ports[self.count + index]),
            "ETUDE_POD": f"broker-{index}",
            "ETUDE_BROKER_TARGET": ",".join(self.targets),
        }
        command = [sys.executable, "-m", "etude.envserver.main", "broker"]
        with (self.folder / f"broker-{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(command, env=environment, stderr=log)

    def kill(self, index: int) -> None:
        """End one broker as a lost node does."""
        process = self._processes.pop(index)
        process.send_signal(signal.SIGKILL)
        process.wait()

    @property
    def cpu_s(self) -> dict[int, float]:
        """CPU time of each broker by process id."""
        return {each.pid: process_cpu_s(each.pid) for each in self._processes.values()}

    @property
    def rss_mib(self) -> list[float]:
        """Memory of each broker."""
        pages = [
            int(Path(f"/proc/{each.pid}/statm").read_text().split()[1])
            for each in self._processes.values()
        ]
        return [each * os.sysconf("SC_PAGE_SIZE") / 2**20 for each in pages]

    def stop(self) -> None:
        """End all brokers."""
        for index in list(self._processes):
            self.kill(index)
