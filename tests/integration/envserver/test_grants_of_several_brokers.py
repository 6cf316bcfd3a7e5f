"""A host without credentials whose pool has several brokers: each knows its own orders alone."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.environments import brokers
from tests.support.stores.s3_servers import BUCKET

from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.blobs import DeniedError, is_unavailable, open_store
from etude.common.errors import StoreError
from etude.common.rpc import server as rpc_server
from etude.common.rpc.broker_addresses import BrokerAddresses
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.host.broker_links import BrokerLinks
from etude.envserver.read_grants.granted_reads import BrokerGrants, GrantedReads
from etude.v1 import environments_pb2_grpc

ABSENT = "127.0.0.1:9"


@dataclass(slots=True)
class ServedBroker:
    """A broker that listens."""

    broker: Broker
    server: rpc_server.Server

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def order(self, uri: str) -> None:
        self.broker.dispatcher.workspaces.record(uri, now_s=time.monotonic())


@pytest.fixture
async def both(minio_endpoint: str, s3_credentials: None) -> AsyncIterator[list[ServedBroker]]:
    store = {"endpoint": minio_endpoint, "secretRef": {"name": "s3"}}
    spec = EnvPoolSpec.model_validate({"templates": [{"name": "python"}], "store": store})
    made = []
    for _ in range(2):
        broker = brokers.started(MemoryHostClient(), spec=spec)
        server = rpc_server.Server([])
        environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
            brokers.lone_service(broker), server.grpc_server
        )
        await server.start()
        made.append(ServedBroker(broker, server))
    yield made
    for each in made:
        await each.server.stop(0)


@pytest.fixture
def task(minio_endpoint: str, s3_credentials: None, tmp_path: Path) -> str:
    """The prefix of a task's files."""
    uri = f"s3://{BUCKET}/{tmp_path.name}/task"
    open_store(uri, endpoint=minio_endpoint).put("greet.sh", b"echo hello")
    return uri


async def read(uri: str, scratch: Path, *targets: str) -> bytes:
    """The task's file, as a host of these brokers reads it."""
    links = BrokerLinks(BrokerAddresses(",".join(targets)), "n1")
    try:
        reads = GrantedReads(BrokerGrants(links, asyncio.get_running_loop()).ask)
        folder = await asyncio.to_thread(reads.local_folder, uri, scratch)
        return (folder / "greet.sh").read_bytes()
    finally:
        await links.close()


@pytest.mark.parametrize("number", [0, 1])
async def test_the_broker_that_ordered_a_workspace_is_found(
    both: list[ServedBroker], task: str, tmp_path: Path, number: int
) -> None:
    both[number].order(task)
    targets = [each.target for each in both]
    assert await read(task, tmp_path, ABSENT, *targets) == b"echo hello"


async def test_a_refusal_of_all_is_one_that_a_retry_does_not_change(
    both: list[ServedBroker], task: str, tmp_path: Path
) -> None:
    with pytest.raises(DeniedError, match=r"no broker grants to read it: .*no workspace"):
        await read(task, tmp_path, *(each.target for each in both))


async def test_without_an_answer_of_each_the_store_counts_as_away(
    both: list[ServedBroker], task: str, tmp_path: Path
) -> None:
    for targets in ((ABSENT,), (both[0].target, ABSENT)):
        with pytest.raises(StoreError, match="a broker does not answer") as caught:
            await read(task, tmp_path, *targets)
        assert is_unavailable(caught.value)
