"""A broker whose nodes hold leases in memory, and what its clients ask for."""

import asyncio
import contextlib

from etude.common.api.pool.lease_classes import LeaseClass, LeaseClassName
from etude.common.api.pool.spec import EnvPoolSpec, LeasePolicy, Template
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.broker.service import BrokerService
from etude.envserver.broker.shards.peers import Peers
from etude.envserver.broker.shards.router import ShardRouter
from etude.v1 import environments_pb2

PATIENCE_S = 30
"""Generous: neighbours may hold both cores."""

Response = environments_pb2.LaunchBatchResponse


def pool(replicas: int = 1, max_queue: int = 100, max_per_run: int | None = None) -> EnvPoolSpec:
    return EnvPoolSpec(
        templates=(Template(name="python"),),
        replicas=replicas,
        lease=LeasePolicy(max_queue=max_queue, max_per_run=max_per_run),
    )


def started(nodes: MemoryHostClient, *endpoints: str, spec: EnvPoolSpec | None = None) -> Broker:
    broker = Broker(spec or pool(), nodes, started_s=-REBUILD_S)
    for endpoint in endpoints or ("n1",):
        broker.heartbeat(nodes.heartbeat(endpoint))
    return broker


def start_with_floor(nodes: MemoryHostClient, *endpoints: str, floor: int) -> Broker:
    """A broker whose class of people has a floor."""
    serving = LeaseClass(name=LeaseClassName.SERVING, floor_slots=floor)
    lease = LeasePolicy(classes=(serving,))
    spec = EnvPoolSpec(templates=(Template(name="python"),), lease=lease)
    return started(nodes, *endpoints, spec=spec)


def expect_nobody(broker: Broker) -> None:
    """Let a broker take what people asked for as long ago."""
    rules = broker.queue.shares.rules
    broker.queue.shares.rules = {name: each._replace(headroom_s=0) for name, each in rules.items()}


def lone_service(broker: Broker) -> BrokerService:
    """The RPCs of a broker that is the only one of its pool."""
    return BrokerService(ShardRouter(broker, Peers(name=broker.shard)))


def request(
    key: str = "k", count: int = 1, **fields: object
) -> environments_pb2.LaunchBatchRequest:
    made = environments_pb2.LaunchBatchRequest(
        run_id="run",
        idempotency_key=key,
        template="python",
        workspace=environments_pb2.WorkspaceSource(uri="file:///tasks/1"),
        count=count,
        toolset="Compact",
        ttl_seconds=60,
    )
    made.MergeFrom(environments_pb2.LaunchBatchRequest(**fields))  # type: ignore[arg-type]
    return made


async def launched(broker: Broker, asked: environments_pb2.LaunchBatchRequest) -> list[Response]:
    async with asyncio.timeout(PATIENCE_S):
        return [outcome async for outcome in broker.launch(asked)]


def ids(outcomes: list[Response]) -> list[str]:
    return [o.lease.lease_id for o in sorted(outcomes, key=lambda o: o.index)]


async def some(
    broker: Broker, asked: environments_pb2.LaunchBatchRequest, count: int
) -> list[Response]:
    """The first so many outcomes; then the client goes away."""
    found: list[Response] = []
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(broker.launch(asked)) as outcomes:
        async for outcome in outcomes:
            found.append(outcome)
            if len(found) >= count:
                break
    return found
