"""A pool for measuring: broker and host as processes, and a client."""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

from etude.common.rpc import channels
from etude.envserver.drivers.vm import vmm_processes
from etude.v1 import (
    environment_state_pb2,
    environment_state_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

READY_LIMIT_S = 180.0
DEADLINE_S = 300.0
TREE = {"notes.txt": "0123456789abcdef" * 256, "run.sh": "echo ran\n"}
"""A task's first files: one of 4 KiB for reading."""
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True, kw_only=True)
class Pool:
    """Processes, their ports, and a client's stubs."""

    folder: Path
    image: Path | None
    """Of microVMs; None for driver Process."""
    slots: int
    driver: str = "QemuMicroVM"
    """Driver of an image."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of both processes."""
    run_id: str = "bench"
    node: subprocess.Popen[bytes] | None = None
    broker: subprocess.Popen[bytes] | None = None
    ports: dict[str, int] = field(default_factory=dict)

    async def start(self) -> None:
        """Start both, and wait until they are ready."""
        for name in ("broker", "node", "probe-broker", "probe-node"):
            self.ports[name] = free_port()
        workspace = self.folder / "task"
        workspace.mkdir()
        for name, text in TREE.items():
            (workspace / name).write_text(text)
        pool = {"name": "bench", "uid": "u", "spec": self.spec()}
        (self.folder / "pool.json").write_text(json.dumps(pool))
        self.broker = self.spawn("broker")
        self.node = self.spawn("node")
        await self.ready("broker")
        await self.ready("node")

    def spec(self) -> dict[str, object]:
        """Of the pool."""
        template, isolation = {"name": "t", "trust": "Trusted"}, {"minimum": "Process"}
        if self.image is not None:
            template["image"] = self.image.as_uri()
            isolation["driver"] = self.driver
        return {"templates": [template], "isolation": isolation, "slotsPerReplica": self.slots}

    def spawn(self, role: str) -> subprocess.Popen[bytes]:
        """One process of the pool."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "ETUDE_POOL_FILE": str(self.folder / "pool.json"),
            "ETUDE_PORT": str(self.ports[role]),
            "ETUDE_PROBE_PORT": str(self.ports[f"probe-{role}"]),
            "ETUDE_POD": f"bench-{role}-0",
            "ETUDE_BROKER_TARGET": f"127.0.0.1:{self.ports['broker']}",
            "ETUDE_SCRATCH": str(self.folder / "scratch"),
            **self.settings,
        }
        with (self.folder / f"{role}.log").open("ab") as log:
            words = [sys.executable, "-m", "etude.envserver.main", role]
            return subprocess.Popen(words, env=environment, stderr=log)

    async def ready(self, role: str) -> None:
        """Wait for a process.

        Raises:
            RuntimeError: it ended, or takes too long.
        """
        url = f"http://127.0.0.1:{self.ports[f'probe-{role}']}/readyz"
        process = self.node if role == "node" else self.broker
        for _ in range(int(READY_LIMIT_S / 0.05)):
            if await asyncio.to_thread(answers, url):
                return
            if process is not None and process.poll() is not None:
                break
            await asyncio.sleep(0.05)
        raise RuntimeError((self.folder / f"{role}.log").read_text()[-2000:])

    def stop(self) -> None:
        """End both as a kubelet would."""
        for process in (self.node, self.broker):
            if process is not None:
                process.terminate()
                process.wait(60)
        # The node leaves them for its successor, which will not come.
        vmm_processes.kill_processes(vmm_processes.find_marked_processes(self.folder))

    def cpu_ms(self) -> float:
        """CPU time of broker and node, and of the node's machines that have ended."""
        pids = [process.pid for process in (self.broker, self.node) if process is not None]
        return sum(used_ms(pid) for pid in pids)

    def machines(self) -> list[int]:
        """Processes of the monitors that live, whoever started them."""
        return [process.pid for process in vmm_processes.find_marked_processes(self.folder)]

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator["Client"]:
        """What a rollout worker holds."""
        async with (
            channels.dial(f"127.0.0.1:{self.ports['broker']}") as broker,
            channels.dial(f"127.0.0.1:{self.ports['node']}") as node,
        ):
            yield Client(
                environments_pb2_grpc.EnvBrokerServiceStub(broker),
                environments_pb2_grpc.EnvNodeServiceStub(node),
                environment_state_pb2_grpc.EnvStateServiceStub(node),
                (self.folder / "task").as_uri(),
            )


@dataclass(slots=True)
class Client:
    """The calls that are measured."""

    broker: "environments_pb2_grpc.EnvBrokerServiceAsyncStub"
    node: "environments_pb2_grpc.EnvNodeServiceAsyncStub"
    states: "environment_state_pb2_grpc.EnvStateServiceAsyncStub"
    uri: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def launch(
        self,
        count: int = 1,
        *,
        run_id: str = "bench",
        snapshot_id: str = "",
        uri: str = "",
        image: str = "",
    ) -> list[environments_pb2.Lease]:
        """Environments, when all of them are there.

        Raises:
            RuntimeError: one is not.
        """
        outcomes = [
            outcome
            async for outcome in self.outcomes(
                count, run_id=run_id, snapshot_id=snapshot_id, uri=uri, image=image
            )
        ]
        for outcome in outcomes:
            if not outcome.HasField("lease"):
                raise RuntimeError(f"no environment: {outcome.failure}")
        return [outcome.lease for outcome in outcomes]

    def outcomes(
        self, count: int, *, run_id: str, snapshot_id: str = "", uri: str = "", image: str = ""
    ) -> AsyncIterator[environments_pb2.LaunchBatchResponse]:
        """What became of each, as it comes."""
        request = environments_pb2.LaunchBatchRequest(
            run_id=run_id,
            idempotency_key=f"key-{next(self._numbers)}",
            template="t",
            workspace=environments_pb2.WorkspaceSource(uri=uri or self.uri),
            snapshot_id=snapshot_id,
            count=count,
            image=image,
            toolset="Standard",
            ttl_seconds=3_600,
            queue_timeout_seconds=600,
        )
        return aiter(self.broker.LaunchBatch(request, timeout=DEADLINE_S))

    async def turn(
        self, lease: environments_pb2.Lease, *calls: tuple[str, Mapping[str, object]]
    ) -> Sequence[environments_pb2.ToolResult]:
        """Results of one turn."""
        messages = [
            environments_pb2.ToolCall(
                call_id=f"call-{next(self._numbers)}",
                name=name,
                arguments_json=json.dumps(arguments),
            )
            for name, arguments in calls
        ]
        request = environments_pb2.RunTurnRequest(
            lease_id=lease.lease_id, agent_token=lease.agent_token, calls=messages
        )
        return (await self.node.RunTurn(request, timeout=DEADLINE_S)).results

    async def snapshot(self, lease: environments_pb2.Lease, name: str) -> None:
        """Save its state under a name; it goes on."""
        request = environment_state_pb2.SnapshotRequest(
            lease_id=lease.lease_id,
            control_token=lease.control_token,
            snapshot_id=name,
            with_memory=True,
        )
        await self.states.Snapshot(request, timeout=DEADLINE_S)

    async def rollback(self, lease: environments_pb2.Lease, name: str) -> None:
        """Put it back to what it was."""
        request = environment_state_pb2.RollbackRequest(
            lease_id=lease.lease_id, control_token=lease.control_token, snapshot_id=name
        )
        await self.states.Rollback(request, timeout=DEADLINE_S)

    async def release(self, leases: Sequence[environments_pb2.Lease]) -> None:
        """End them."""
        ids = [lease.lease_id for lease in leases]
        request = environments_pb2.ReleaseLeasesRequest(lease_ids=ids)
        await self.broker.ReleaseLeases(request, timeout=DEADLINE_S)


@contextlib.asynccontextmanager
async def running(
    folder: Path, image: Path | None, *, slots: int
) -> AsyncIterator[tuple[Pool, Client]]:
    """A pool that is ready, and a client."""
    pool = Pool(folder=folder, image=image, slots=slots)
    try:
        await pool.start()
        async with pool.client() as client:
            yield pool, client
    finally:
        pool.stop()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a probe says yes."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own loopback
            return bool(answer.status == 200)
    except OSError:
        return False


def used_ms(pid: int) -> float:
    """CPU time of a process and of its children that have ended: proc(5), fields 14 to 17."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * TICK_MS
