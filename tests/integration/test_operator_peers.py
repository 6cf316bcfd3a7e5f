"""The operator's side of the wire, against a controller and a broker that really listen."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

import grpc
import pytest
from typing_extensions import override

from etude.common.rpc import channels
from etude.common.rpc.server import Server
from etude.common.tls.transport import security_from_setting
from etude.operator.clock import SystemClock
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Ref
from etude.operator.remotes.clients import (
    GrpcRemoteClient,
    MemoryRemoteClient,
    RemoteClient,
    RemoteError,
)
from etude.operator.remotes.followers import Followers, ReportSource
from etude.operator.remotes.report_store import ReportPosition, ReportStore
from etude.v1 import environments_pb2, environments_pb2_grpc, run_pb2, run_pb2_grpc

LIMIT_S = 60.0
"""Far above what a call on this machine takes, also when others load it."""


SLOTS = environments_pb2.WatchPoolResponse(sequence=1, slots=64, leased=3)


def happening(sequence: int) -> run_pb2.WatchRunResponse:
    event = run_pb2.RunEvent(reason=f"Event{sequence}")
    return run_pb2.WatchRunResponse(run_uid="uid", epoch=7, sequence=sequence, event=event)


class Controller(run_pb2_grpc.RunServiceServicer):
    def __init__(self) -> None:
        self.orders: list[run_pb2.CommandRequest] = []

    @override
    async def WatchRun(
        self,
        request: run_pb2.WatchRunRequest,
        context: grpc.aio.ServicerContext[run_pb2.WatchRunRequest, run_pb2.WatchRunResponse],
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        for sequence in range(request.after_sequence + 1, 4):
            yield happening(sequence)
        await asyncio.sleep(LIMIT_S)

    @override
    async def Command(
        self,
        request: run_pb2.CommandRequest,
        context: grpc.aio.ServicerContext[run_pb2.CommandRequest, run_pb2.CommandResponse],
    ) -> run_pb2.CommandResponse:
        self.orders.append(request)
        return run_pb2.CommandResponse()


class Broker(environments_pb2_grpc.PoolServiceServicer):
    @override
    async def WatchPool(
        self,
        request: environments_pb2.WatchPoolRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.WatchPoolRequest, environments_pb2.WatchPoolResponse
        ],
    ) -> AsyncIterator[environments_pb2.WatchPoolResponse]:
        yield SLOTS
        await asyncio.sleep(LIMIT_S)

    @override
    async def Drain(
        self,
        request: environments_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.DrainRequest, environments_pb2.DrainResponse
        ],
    ) -> environments_pb2.DrainResponse:
        empty = [name for name in request.node_ids if name != "busy"]
        return environments_pb2.DrainResponse(empty_node_ids=empty)

    @override
    async def UpdatePool(
        self,
        request: environments_pb2.UpdatePoolRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.UpdatePoolRequest, environments_pb2.UpdatePoolResponse
        ],
    ) -> environments_pb2.UpdatePoolResponse:
        return environments_pb2.UpdatePoolResponse()


@contextlib.asynccontextmanager
async def serving(controller: Controller) -> AsyncIterator[Server]:
    server = Server(["etude.v1.RunService", "etude.v1.PoolService"])
    run_pb2_grpc.add_RunServiceServicer_to_server(controller, server.grpc_server)
    environments_pb2_grpc.add_PoolServiceServicer_to_server(Broker(), server.grpc_server)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


class Wired(NamedTuple):
    """A body of the seam, and a controller and a broker that it reaches."""

    peers: RemoteClient
    target: str
    orders: list[run_pb2.CommandRequest]


@pytest.fixture(params=["memory", "grpc"])
async def wired(request: pytest.FixtureRequest) -> AsyncIterator[Wired]:
    if request.param == "memory":
        peers = MemoryRemoteClient()
        for sequence in range(1, 4):
            peers.runs["target"].append(happening(sequence))
        peers.pools["target"].append(SLOTS)
        peers.hosts_in_use.add("busy")
        yield Wired(peers, "target", peers.commands)
        return
    controller = Controller()
    async with serving(controller) as server:
        yield Wired(GrpcRemoteClient(), f"127.0.0.1:{server.port}", controller.orders)


async def test_a_stream_goes_on_after_the_position_that_is_known(wired: Wired) -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = wired.peers.watch_run(wired.target, ReportPosition(7, 1))
        heard = [(await anext(stream)).event.reason for _ in range(2)]
    assert heard == ["Event2", "Event3"]


async def test_a_broker_says_what_it_has(wired: Wired) -> None:
    async with asyncio.timeout(LIMIT_S):
        assert await anext(wired.peers.watch_pool(wired.target)) == SLOTS


async def test_an_order_arrives_once(wired: Wired) -> None:
    request = run_pb2.CommandRequest(command_id="a", suspend=run_pb2.SuspendRun(checkpoint=True))
    async with asyncio.timeout(LIMIT_S):
        await wired.peers.send_command(wired.target, request)
    assert wired.orders == [request]


async def test_a_peer_that_does_not_listen_is_a_clear_error() -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(RemoteError, match="connect"):
            await anext(GrpcRemoteClient().watch_run("127.0.0.1:1", ReportPosition()))


async def test_a_peer_that_goes_away_ends_the_stream_with_an_error() -> None:
    async with asyncio.timeout(LIMIT_S), serving(Controller()) as server:
        stream = GrpcRemoteClient().watch_run(f"127.0.0.1:{server.port}", ReportPosition(7, 2))
        await anext(stream)
        await server.stop(0)
        with pytest.raises(RemoteError):
            await anext(stream)


NOWHERE_PRIVATE = "10.9.9.9:7000"
"""Beyond this machine, and a test's process has neither certificates nor leave to go without."""


async def test_a_peer_that_cannot_be_spoken_to_safely_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "process_security", lambda: security_from_setting(""))
    peers, words = GrpcRemoteClient(), "InvalidTls"
    with pytest.raises(RemoteError, match=words):
        await anext(peers.watch_run(NOWHERE_PRIVATE, ReportPosition()))
    with pytest.raises(RemoteError, match=words):
        await anext(peers.watch_pool(NOWHERE_PRIVATE))
    with pytest.raises(RemoteError, match=words):
        await peers.send_command(NOWHERE_PRIVATE, run_pb2.CommandRequest())
    with pytest.raises(RemoteError, match=words):
        await peers.drain(NOWHERE_PRIVATE, ["a"])


async def test_followers_write_into_the_book_and_notice_a_controller_of_another_run() -> None:
    run, pool = Ref("RLRun", "lab", "a"), Ref("EnvPool", "lab", "p")
    heard, complete = set[Ref](), asyncio.Event()
    book = ReportStore(SystemClock())

    def tell(key: Ref, delay_s: float) -> None:
        heard.add(key)
        if len(book.run("uid").pending) == 3 and pool in heard:
            complete.set()

    async with (
        asyncio.timeout(LIMIT_S),
        serving(Controller()) as server,
        asyncio.TaskGroup() as tasks,
    ):
        followers = Followers(MemoryCluster(), book, GrpcRemoteClient(), tell, tasks)
        target = f"127.0.0.1:{server.port}"
        followers.follow(Ref("RLRun", "lab", "other"), ReportSource("other"), target, pod_uid="1")
        followers.follow(pool, ReportSource("pool"), target, pod_uid="1")
        followers.follow(run, ReportSource("uid"), target, pod_uid="1")
        await complete.wait()
        assert book.run("uid").is_connected
        assert not book.run("other").is_connected
        newest = book.pool("pool").newest
        assert newest is not None
        assert newest.leased == 3
        followers.unfollow_all()
    assert not book.run("uid").is_connected


async def test_a_broker_says_which_hosts_are_empty(wired: Wired) -> None:
    assert await wired.peers.drain(wired.target, ["idle", "busy"]) == {"idle"}
    assert await wired.peers.drain(wired.target, []) == frozenset()
