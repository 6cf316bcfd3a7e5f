"""A real node with a real process driver, and a client of its open door; a pool of processes."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support import needs
from tests.support.free_ports import reserve_port

from etude.common.rpc import channels
from etude.common.rpc import server as rpc_server
from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.host.access_service import AccessService
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.host import Host
from etude.envserver.host.service import HostService
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.v1 import environment_access_pb2 as access_pb2
from etude.v1 import environment_access_pb2_grpc, environments_pb2, environments_pb2_grpc

DEADLINE_S = 60
"""Generous: neighbours may hold both cores."""
FILES = {"shop/core.py": "def add(a, b):\n    return a - b\n", "notes.txt": "first\n"}


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[ProcessDriver]:
    (tmp_path / "scratch").mkdir()
    made = ProcessDriver(tmp_path / "scratch")
    try:
        await made.start()
    except DriverUnavailableError as error:
        if needs.is_required("sandbox", "qemu"):
            raise
        pytest.skip(str(error))
    yield made
    await made.stop()


@pytest.fixture
def source(tmp_path: Path) -> str:
    folder = tmp_path / "source"
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder.as_uri()


@dataclass(slots=True)
class Said:
    """What a program came to."""

    out: bytes = b""
    err: bytes = b""
    exit: access_pb2.ExecExit | None = None


@dataclass(slots=True)
class Door:
    """One lease and the calls that its controller may make."""

    lease: environments_pb2.Lease
    access: "environment_access_pb2_grpc.EnvAccessServiceAsyncStub"
    tools: "environments_pb2_grpc.EnvNodeServiceAsyncStub"

    @property
    def key(self) -> dict[str, Any]:
        return {"lease_id": self.lease.lease_id, "control_token": self.lease.control_token}

    def exec(self) -> Any:
        return self.access.Exec(timeout=DEADLINE_S)

    async def run(
        self, shell: str, *steps: access_pb2.ExecRequest, is_open: bool = False, **fields: Any
    ) -> Said:
        """Run a line to its end, with all steps sent at once."""
        call = self.exec()
        opened = access_pb2.ExecOpen(**self.key, shell=shell, **fields)
        for request in (access_pb2.ExecRequest(open=opened), *steps):
            await call.write(request)
        if not is_open:
            await call.done_writing()
        said = Said()
        async for news in call:
            said.out += news.stdout
            said.err += news.stderr
            said.exit = news.exit if news.HasField("exit") else said.exit
        return said

    async def read(self, path: str) -> bytes:
        request = access_pb2.ReadFileRequest(**self.key, path=path)
        chunks = [r.chunk async for r in self.access.ReadFile(request, timeout=DEADLINE_S)]
        return b"".join(chunks)

    async def write(self, path: str, data: bytes) -> access_pb2.FileEntry:
        requests = [
            access_pb2.WriteFileRequest(**self.key, path=path, chunk=chunk)
            for chunk in channels.chunks(data)
        ]
        return (await self.access.WriteFile(iter(requests), timeout=DEADLINE_S)).entry

    async def list(self, path: str = "") -> Sequence[access_pb2.FileEntry]:
        request = access_pb2.ListFilesRequest(**self.key, path=path)
        pages = [p async for p in self.access.ListFiles(request, timeout=DEADLINE_S)]
        return [entry for page in pages for entry in page.entries]

    async def turn(self, call_id: str, name: str, arguments: str) -> str:
        call = environments_pb2.ToolCall(call_id=call_id, name=name, arguments_json=arguments)
        request = environments_pb2.RunTurnRequest(
            lease_id=self.lease.lease_id, agent_token=self.lease.agent_token, calls=[call]
        )
        answer = await self.tools.RunTurn(request, timeout=DEADLINE_S)
        return answer.results[0].content.decode()

    async def diff(self) -> environments_pb2.WorkspaceDiff:
        request = environments_pb2.DiffRequest(**self.key)
        chunks = [c.chunk async for c in self.tools.Diff(request, timeout=DEADLINE_S)]
        return environments_pb2.WorkspaceDiff.FromString(b"".join(chunks))

    async def close(self) -> None:
        request = environments_pb2.CloseEnvironmentsRequest(lease_ids=[self.lease.lease_id])
        await self.tools.CloseEnvironments(request, timeout=DEADLINE_S)


@pytest.fixture
async def door(driver: ProcessDriver, tmp_path: Path, source: str) -> AsyncIterator[Door]:
    node = Host(driver=driver, sources=WorkspaceSources(tmp_path), slots=4, templates={"python"})
    server = rpc_server.Server([])
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(
        HostService(node, Grader(driver, node.cache)), server.grpc_server
    )
    environment_access_pb2_grpc.add_EnvAccessServiceServicer_to_server(
        AccessService(node), server.grpc_server
    )
    await server.start()
    node.endpoint = f"127.0.0.1:{server.port}"
    held = environments_pb2.HeldLease(
        lease=environments_pb2.Lease(
            lease_id="lease-0",
            agent_token="agent",
            control_token="control",
            expires_unix_ms=2**45,
        )
    )
    async with channels.dial(node.endpoint) as channel:
        tools = environments_pb2_grpc.EnvNodeServiceStub(channel)
        request = environments_pb2.OpenEnvironmentsRequest(
            leases=[held],
            template="python",
            workspace=environments_pb2.WorkspaceSource(uri=source),
            toolset="Standard",
        )
        answer = await tools.OpenEnvironments(request, timeout=DEADLINE_S)
        lease = answer.outcomes[0].lease
        yield Door(lease, environment_access_pb2_grpc.EnvAccessServiceStub(channel), tools)
    await server.stop(0)
    await node.close(["lease-0"])


@pytest.fixture
def refusal() -> Callable[[Any], Any]:
    async def code(call: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code()

    return code


@dataclass(slots=True)
class Processes:
    """A broker, a node and what is before them, as processes of this machine."""

    folder: Path
    broker: str = ""
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str, env: Mapping[str, str]) -> str:
        """Start a role and wait until it is ready; returns its address."""
        port, probe = reserve_port(), reserve_port()
        name = f"{arguments[0]}-{len(self.running)}"
        settings = {
            "PATH": os.environ["PATH"],
            "ETUDE_POOL_FILE": str(self.folder / "pool.json"),
            "ETUDE_PORT": str(port),
            "ETUDE_PROBE_PORT": str(probe),
            "ETUDE_POD": name,
            **env,
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "etude.envserver.main", *arguments],
                env=settings,
                stderr=log,
            )
        self.running.append(process)
        deadline_s = time.monotonic() + DEADLINE_S
        while not answers(f"http://127.0.0.1:{probe}/readyz"):
            words = (self.folder / f"{name}.log").read_text()
            assert process.poll() is None, words
            assert time.monotonic() < deadline_s, words
            time.sleep(0.05)
        return f"127.0.0.1:{port}"

    def stop(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A broker and a node with the process driver."""
    made = Processes(tmp_path_factory.mktemp("pool"))
    spec = {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "isolation": {"minimum": "Process"},
        "slotsPerReplica": 8,
        "snapshotsUri": (made.folder / "shared").as_uri(),
    }
    pool = {"name": "demo-repos", "uid": "u", "spec": spec}
    (made.folder / "pool.json").write_text(json.dumps(pool))
    try:
        made.broker = made.start("broker", env={})
        scratch = made.folder / "scratch" / "demo-repos-node-0"
        made.start("node", env={"ETUDE_BROKER_TARGET": made.broker, "ETUDE_SCRATCH": str(scratch)})
        yield made
    finally:
        made.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An edge, and keys that it knows."""

    url: str
    key: str
    other_key: str
    tools_key: str
    folder: Path

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("edge-*.log")))


@pytest.fixture(scope="session")
def edge(processes: Processes) -> Edge:
    lines, made = [], []
    for name, role in (("alice", "full"), ("bob", "full"), ("agent", "tools")):
        done = subprocess.run(
            [sys.executable, "-m", "etude.envserver.main", "key", name, role],
            capture_output=True,
            text=True,
            check=True,
        )
        lines.append(done.stdout)
        made.append(done.stderr.strip())
    keys = processes.folder / "keys"
    keys.write_text("# who may come in\n" + "".join(lines))
    env = {
        "ETUDE_BROKER_TARGET": processes.broker,
        "ETUDE_EDGE_KEYS": str(keys),
        "ETUDE_EDGE_MAX_SANDBOXES": "4",
        "ETUDE_EDGE_MEMORY_MIB": "512",
    }
    address = processes.start("edge", env=env)
    return Edge(
        url=f"http://{address}",
        key=made[0],
        other_key=made[1],
        tools_key=made[2],
        folder=processes.folder,
    )
