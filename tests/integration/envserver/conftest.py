"""A real process driver and a real pool on it, or the reason why this machine refuses one."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import pytest
from tests.support import needs
from tests.support.environments.brokers import lone_service
from tests.support.environments.pool_client import Pool

from etude.common.api.pool.spec import EnvPoolSpec, Isolation, IsolationLevel, Template, Trust
from etude.common.rpc import channels, server
from etude.common.rpc.broker_addresses import BrokerAddresses
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.host_client import GrpcHostClient
from etude.envserver.broker.service import PoolService
from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.host.broker_links import BrokerLinks
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.heartbeat import HostHeartbeat
from etude.envserver.host.host import Host
from etude.envserver.host.service import HostService
from etude.envserver.host.snapshots.state_service import StateService
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.v1 import environment_state_pb2_grpc, environments_pb2_grpc

MakeWorkspace = Callable[[ProcessDriver, str, Mapping[str, bytes]], Path]


def allows_namespaces() -> bool:
    """Whether this machine gives a process namespaces of its own: then our driver has to start."""
    words = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "true")
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[ProcessDriver]:
    made = ProcessDriver(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    try:
        await made.start()
    except DriverUnavailableError as error:
        if needs.is_required("sandbox", "qemu") or allows_namespaces():
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


def spec(templates: Sequence[Template] = (), slots: int = 4) -> EnvPoolSpec:
    return EnvPoolSpec(
        templates=tuple(templates) or (Template(name="python", trust=Trust.TRUSTED),),
        isolation=Isolation(minimum=IsolationLevel.PROCESS),
        slots_per_replica=slots,
    )


@pytest.fixture
async def pool(driver: ProcessDriver, tmp_path: Path, source: str) -> AsyncIterator[Pool]:
    stop = asyncio.Event()
    nodes = GrpcHostClient()
    broker = Broker(spec(), nodes, started_s=-REBUILD_S)
    broker_server = server.Server([])
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
        lone_service(broker), broker_server.grpc_server
    )
    environments_pb2_grpc.add_PoolServiceServicer_to_server(
        PoolService(broker, stop), broker_server.grpc_server
    )
    await broker_server.start()
    node = Host(driver=driver, sources=WorkspaceSources(tmp_path), slots=4, templates={"python"})
    node_server = server.Server([])
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(
        HostService(node, Grader(driver, node.cache)), node_server.grpc_server
    )
    environment_state_pb2_grpc.add_EnvStateServiceServicer_to_server(
        StateService(node), node_server.grpc_server
    )
    await node_server.start()
    node.endpoint = f"127.0.0.1:{node_server.port}"
    async with channels.dial(f"127.0.0.1:{broker_server.port}") as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        links = BrokerLinks(BrokerAddresses(f"127.0.0.1:{broker_server.port}"), "node-0")
        tasks = [
            asyncio.create_task(broker.run(stop)),
            asyncio.create_task(HostHeartbeat(node, links, "node-0").run(stop)),
        ]
        yield Pool(stub, environments_pb2_grpc.PoolServiceStub(channel), source)
        stop.set()
        await asyncio.gather(*tasks)
        await links.close()
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
