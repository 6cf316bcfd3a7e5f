"""A real process driver and a real pool on it, or the reason why this machine refuses one."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from etude.common import channels, serving
from etude.common.api.pool import EnvPoolSpec, Isolation, IsolationLevel, Template, Trust
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.nodes import GrpcNodes
from etude.envserver.broker.service import BrokerService, PoolService
from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.drivers.process import ProcessDriver
from etude.envserver.node.grading import Grader
from etude.envserver.node.heartbeat import Heartbeat
from etude.envserver.node.node import Node
from etude.envserver.node.service import NodeService
from etude.envserver.node.sources import Sources
from etude.v1 import environments_pb2, environments_pb2_grpc

MakeWorkspace = Callable[[ProcessDriver, str, Mapping[str, bytes]], Path]

DEADLINE_S = 30
"""Generous: neighbours may hold both cores."""


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[ProcessDriver]:
    made = ProcessDriver(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    try:
        await made.start()
    except DriverUnavailableError as error:
        if os.environ.get("ETUDE_REQUIRE") == "sandbox":
            raise
        pytest.skip(str(error))
    yield made
    await made.stop()


@pytest.fixture
def make_workspace() -> MakeWorkspace:
    def make(driver: ProcessDriver, name: str, files: Mapping[str, bytes]) -> Path:
        folder = driver.leases / name / "workspace"
        folder.mkdir(parents=True)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        for entry in (folder, *folder.rglob("*")):
            shutil.chown(entry, *driver.owner())
        return folder

    return make


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A task's first files: one function that subtracts where it should add."""
    folder = tmp_path / "task" / "environment"
    files = {
        "Dockerfile": "FROM python\n",
        "shop/core.py": "def add(a, b):\n    return a - b\n",
        "tests/test_repo.py": (
            "from shop.core import add\ndef test_add():\n    assert add(1, 2) == 3\n"
        ),
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder.as_uri()


@dataclass(slots=True)
class Pool:
    """Clients of one broker and its node, with the calls that tests make."""

    broker: "environments_pb2_grpc.EnvBrokerServiceAsyncStub"
    watch: "environments_pb2_grpc.PoolServiceAsyncStub"
    uri: str
    _channels: dict[str, "environments_pb2_grpc.EnvNodeServiceAsyncStub"] = field(
        default_factory=dict
    )

    def request(
        self, key: str, count: int = 1, **fields: int
    ) -> environments_pb2.LaunchBatchRequest:
        made = environments_pb2.LaunchBatchRequest(
            run_id="run",
            idempotency_key=key,
            template="python",
            workspace=environments_pb2.WorkspaceSource(uri=self.uri),
            count=count,
            toolset="Compact",
        )
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    async def launch(self, key: str, count: int = 1, **fields: int) -> list[environments_pb2.Lease]:
        call = self.broker.LaunchBatch(self.request(key, count, **fields), timeout=DEADLINE_S)
        outcomes = [outcome async for outcome in call]
        assert all(outcome.HasField("lease") for outcome in outcomes), outcomes
        return [o.lease for o in sorted(outcomes, key=lambda o: o.index)]

    def node(
        self, lease: environments_pb2.Lease
    ) -> "environments_pb2_grpc.EnvNodeServiceAsyncStub":
        if lease.endpoint not in self._channels:
            channel = channels.dial(lease.endpoint)
            self._channels[lease.endpoint] = environments_pb2_grpc.EnvNodeServiceStub(channel)
        return self._channels[lease.endpoint]

    async def turn(
        self, lease: environments_pb2.Lease, *calls: tuple[str, str, Mapping[str, str]]
    ) -> list[str]:
        request = environments_pb2.RunTurnRequest(
            lease_id=lease.lease_id,
            agent_token=lease.agent_token,
            calls=[
                environments_pb2.ToolCall(
                    call_id=i, name=name, arguments_json=json.dumps(arguments)
                )
                for i, name, arguments in calls
            ],
        )
        answer = await self.node(lease).RunTurn(request, timeout=DEADLINE_S)
        return [result.content.decode() for result in answer.results]

    async def diff(self, lease: environments_pb2.Lease) -> environments_pb2.WorkspaceDiff:
        request = environments_pb2.DiffRequest(
            lease_id=lease.lease_id, control_token=lease.control_token
        )
        chunks = [c.chunk async for c in self.node(lease).Diff(request, timeout=DEADLINE_S)]
        return environments_pb2.WorkspaceDiff.FromString(b"".join(chunks))

    async def grade(
        self, lease: environments_pb2.Lease, job: environments_pb2.GradeJob
    ) -> environments_pb2.GradeResponse:
        requests = [
            environments_pb2.GradeRequest(
                lease_id=lease.lease_id, control_token=lease.control_token, chunk=chunk
            )
            for chunk in channels.chunks(job.SerializeToString())
        ]
        return await self.node(lease).Grade(iter(requests), timeout=DEADLINE_S)


def spec(templates: Sequence[Template] = (), slots: int = 4) -> EnvPoolSpec:
    return EnvPoolSpec(
        templates=tuple(templates) or (Template(name="python", trust=Trust.TRUSTED),),
        isolation=Isolation(minimum=IsolationLevel.PROCESS),
        slots_per_replica=slots,
    )


@pytest.fixture
async def pool(driver: ProcessDriver, tmp_path: Path, source: str) -> AsyncIterator[Pool]:
    stop = asyncio.Event()
    nodes = GrpcNodes()
    broker = Broker(spec(), nodes)
    broker_server = serving.Server([])
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
        BrokerService(broker), broker_server.grpc_server
    )
    environments_pb2_grpc.add_PoolServiceServicer_to_server(
        PoolService(broker, stop), broker_server.grpc_server
    )
    await broker_server.start()
    node = Node(driver=driver, sources=Sources(tmp_path), slots=4, templates={"python"})
    node_server = serving.Server([])
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(
        NodeService(node, Grader(driver, node.cache)), node_server.grpc_server
    )
    await node_server.start()
    node.endpoint = f"127.0.0.1:{node_server.port}"
    async with channels.dial(f"127.0.0.1:{broker_server.port}") as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        tasks = [
            asyncio.create_task(broker.run(stop)),
            asyncio.create_task(Heartbeat(node, stub, "node-0").run(stop)),
        ]
        yield Pool(stub, environments_pb2_grpc.PoolServiceStub(channel), source)
        stop.set()
        await asyncio.gather(*tasks)
        await node_server.stop(0)
        await broker_server.stop(0)
        await nodes.stop()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str, str], Pool]]:
    """Clients of a broker that runs as a process."""
    opened = []

    def make(target: str, uri: str) -> Pool:
        channel = channels.dial(target)
        opened.append(channel)
        broker = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        return Pool(broker, environments_pb2_grpc.PoolServiceStub(channel), uri)

    yield make
    for channel in opened:
        await channel.close()
