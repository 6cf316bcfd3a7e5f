"""RPC clients of run controllers and pool brokers."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import grpc
from typing_extensions import override

from etude.common.errors import UnavailableError, UserError
from etude.common.rpc.channels import CONTROL_DEADLINE_S, dial
from etude.operator.remotes.report_store import ReportPosition
from etude.v1 import environments_pb2, environments_pb2_grpc, run_pb2, run_pb2_grpc

T = TypeVar("T")

STREAM_LIMIT_S = 600.0
"""A stream is reopened after this, so that none stays half-open."""

HOLD_S = 15
"""Time for which a broker keeps a draining host free. Requests repeat every two seconds; without an
operator the host is soon used again."""
DRAIN_DEADLINE_S = 3.0
"""Longest wait of a pass over a pool."""


class RemoteError(UnavailableError):
    """A controller or broker did not answer, or not as expected."""

    reason = "ControllerUnreachable"


class RemoteClient(Protocol):
    """Client of controllers and brokers.

    Streams end with RemoteError if the peer ends, and without an error when they should be
    reopened.
    """

    def watch_run(
        self, target: str, after: ReportPosition
    ) -> AsyncIterator[run_pb2.WatchRunResponse]: ...
    def watch_pool(self, target: str) -> AsyncIterator[environments_pb2.WatchPoolResponse]: ...
    async def send_command(self, target: str, request: run_pb2.CommandRequest) -> None:
        """Send a command.

        Raises:
            RemoteError: it was not accepted.
        """
        ...

    async def drain(self, target: str, hosts: Sequence[str]) -> frozenset[str]:
        """Stop a broker's placements on these hosts; returns those that are empty of its leases.

        Hosts that were named before and are not named now get environments again.

        Raises:
            RemoteError: it did not answer, or cannot know.
        """
        ...


@dataclass(slots=True)
class GrpcRemoteClient(RemoteClient):
    """Client over gRPC."""

    @override
    async def watch_run(
        self, target: str, after: ReportPosition
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        request = run_pb2.WatchRunRequest(epoch=after.epoch, after_sequence=after.sequence)
        async with _open_channel(target) as channel:
            call = run_pb2_grpc.RunServiceStub(channel).WatchRun(request, timeout=STREAM_LIMIT_S)
            async for response in _until_reopened(call):
                yield response

    @override
    async def watch_pool(self, target: str) -> AsyncIterator[environments_pb2.WatchPoolResponse]:
        request = environments_pb2.WatchPoolRequest()
        async with _open_channel(target) as channel:
            stub = environments_pb2_grpc.PoolServiceStub(channel)
            async for response in _until_reopened(stub.WatchPool(request, timeout=STREAM_LIMIT_S)):
                yield response

    @override
    async def send_command(self, target: str, request: run_pb2.CommandRequest) -> None:
        async with _open_channel(target) as channel:
            try:
                await run_pb2_grpc.RunServiceStub(channel).Command(
                    request, timeout=CONTROL_DEADLINE_S
                )
            except grpc.aio.AioRpcError as cause:
                raise RemoteError(f"{target}: {cause.details() or cause.code()}") from cause

    @override
    async def drain(self, target: str, hosts: Sequence[str]) -> frozenset[str]:
        request = environments_pb2.DrainRequest(node_ids=hosts, hold_seconds=HOLD_S)
        async with _open_channel(target) as channel:
            try:
                answer = await environments_pb2_grpc.PoolServiceStub(channel).Drain(
                    request, timeout=DRAIN_DEADLINE_S
                )
            except grpc.aio.AioRpcError as cause:
                raise RemoteError(f"{target}: {cause.details() or cause.code()}") from cause
        return frozenset(answer.empty_node_ids)


@contextlib.asynccontextmanager
async def _open_channel(target: str) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel for the duration of the block.

    Raises:
        RemoteError: TLS settings forbid this target; other targets are not affected.
    """
    try:
        channel = dial(target)
    except UserError as cause:
        raise RemoteError(str(cause)) from cause
    async with channel:
        yield channel


async def _until_reopened(stream: AsyncIterable[T]) -> AsyncIterator[T]:
    try:
        async for response in stream:
            yield response
    except grpc.aio.AioRpcError as cause:
        if cause.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise RemoteError(str(cause.details() or cause.code())) from cause


@dataclass(slots=True)
class MessageLog(Generic[T]):
    """Messages of a peer so far, replayed to later listeners."""

    messages: list[T] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, message: T) -> None:
        self.messages.append(message)
        self._news.set()
        self._news = asyncio.Event()

    async def listen(self) -> AsyncIterator[T]:
        """Yield all messages from the start, then new ones."""
        heard = 0
        while True:
            while heard < len(self.messages):
                yield self.messages[heard]
                heard += 1
            await self._news.wait()


@dataclass(slots=True)
class MemoryRemoteClient(RemoteClient):
    """Client of scripted controllers and brokers, for tests."""

    runs: defaultdict[str, MessageLog[run_pb2.WatchRunResponse]] = field(
        default_factory=lambda: defaultdict(MessageLog)
    )
    pools: defaultdict[str, MessageLog[environments_pb2.WatchPoolResponse]] = field(
        default_factory=lambda: defaultdict(MessageLog)
    )
    commands: list[run_pb2.CommandRequest] = field(default_factory=list)
    drained: dict[str, frozenset[str]] = field(default_factory=dict)
    """Hosts of the last request, by broker."""
    hosts_in_use: set[str] = field(default_factory=set)
    """Hosts that are not empty."""
    unresponsive: set[str] = field(default_factory=set)
    """Brokers that do not answer."""

    @override
    async def watch_run(
        self, target: str, after: ReportPosition
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        async for response in self.runs[target].listen():
            if response.epoch != after.epoch or response.sequence > after.sequence:
                yield response

    @override
    async def watch_pool(self, target: str) -> AsyncIterator[environments_pb2.WatchPoolResponse]:
        async for response in self.pools[target].listen():
            yield response

    @override
    async def send_command(self, target: str, request: run_pb2.CommandRequest) -> None:
        self.commands.append(request)

    @override
    async def drain(self, target: str, hosts: Sequence[str]) -> frozenset[str]:
        if target in self.unresponsive:
            raise RemoteError(f"{target}: does not answer")
        self.drained[target] = frozenset(hosts)
        return self.drained[target] - self.hosts_in_use
