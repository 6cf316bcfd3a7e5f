"""RPC clients of run controllers, pool brokers and feedback services."""

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
from etude.operator.remotes.release_order import ReleaseOrder, send_release_order
from etude.operator.remotes.report_store import ReportPosition
from etude.v1 import (
    environments_pb2,
    environments_pb2_grpc,
    release_pb2,
    release_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)

T = TypeVar("T")

_REJECTED = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""Codes of a request that would be rejected again. A service that another one replaces, or whose
keys are renewed, answers otherwise later."""

STREAM_LIMIT_S = 600.0
"""A stream is reopened after this, so that none stays half-open."""

RELEASE_POLL_S = 5.0
"""Time between two questions for the state of a route's releases."""

HOLD_S = 15
"""Time for which a broker keeps a draining host free. Requests repeat every two seconds; without an
operator the host is soon used again."""
DRAIN_DEADLINE_S = 3.0
"""Longest wait of a pass over a pool."""


class RemoteError(UnavailableError):
    """A controller, broker or service did not answer, or not as expected."""

    reason = "ControllerUnreachable"


class RemoteClient(Protocol):
    """Client of controllers, brokers and feedback services.

    Streams end with RemoteError if the peer ends, and without an error when they should be
    reopened.
    """

    def watch_run(
        self, target: str, after: ReportPosition
    ) -> AsyncIterator[run_pb2.WatchRunResponse]: ...
    def watch_pool(self, target: str) -> AsyncIterator[environments_pb2.WatchPoolResponse]: ...
    def watch_release(self, target: str) -> AsyncIterator[release_pb2.GetReleaseStatusResponse]: ...
    async def send_command(self, target: str, request: run_pb2.CommandRequest) -> None:
        """Send a command.

        Raises:
            RemoteError: it was not accepted.
        """
        ...

    async def ask_release(self, target: str, order: ReleaseOrder) -> release_pb2.ReleaseDecision:
        """Forward a request about releases; what the service rejects is a decision, Refuse.

        Raises:
            RemoteError: it did not answer.
        """
        ...

    async def drain(self, target: str, hosts: Sequence[str]) -> frozenset[str]:
        """Stop a broker's placements on these hosts; returns those that are empty of its leases.

        Hosts that were named before and are not named now get environments again.

        Raises:
            RemoteError: it did not answer, or cannot know.
        """
        ...

    async def update_pool(self, target: str, pool_json: str) -> None:
        """Give a broker the newest spec of its pool.

        Raises:
            RemoteError: it did not take it.
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
    async def watch_release(
        self, target: str
    ) -> AsyncIterator[release_pb2.GetReleaseStatusResponse]:
        request = release_pb2.GetReleaseStatusRequest()
        async with _open_channel(target) as channel:
            stub = release_pb2_grpc.ReleaseServiceStub(channel)
            while True:
                try:
                    answer = await stub.GetReleaseStatus(request, timeout=CONTROL_DEADLINE_S)
                except grpc.aio.AioRpcError as cause:
                    raise RemoteError(f"{target}: {cause.details() or cause.code()}") from cause
                yield answer
                await asyncio.sleep(RELEASE_POLL_S)

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
    async def ask_release(self, target: str, order: ReleaseOrder) -> release_pb2.ReleaseDecision:
        async with _open_channel(target) as channel:
            try:
                return await send_release_order(channel, order)
            except grpc.aio.AioRpcError as cause:
                what = cause.details() or str(cause.code())
                if cause.code() in _REJECTED:
                    return release_pb2.ReleaseDecision(action="Refuse", sentence=what)
                raise RemoteError(f"{target}: {what}") from cause

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

    @override
    async def update_pool(self, target: str, pool_json: str) -> None:
        request = environments_pb2.UpdatePoolRequest(pool_json=pool_json)
        async with _open_channel(target) as channel:
            try:
                await environments_pb2_grpc.PoolServiceStub(channel).UpdatePool(
                    request, timeout=CONTROL_DEADLINE_S
                )
            except grpc.aio.AioRpcError as cause:
                raise RemoteError(f"{target}: {cause.details() or cause.code()}") from cause


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
    """Client of scripted controllers, brokers and feedback services, for tests."""

    runs: defaultdict[str, MessageLog[run_pb2.WatchRunResponse]] = field(
        default_factory=lambda: defaultdict(MessageLog)
    )
    pools: defaultdict[str, MessageLog[environments_pb2.WatchPoolResponse]] = field(
        default_factory=lambda: defaultdict(MessageLog)
    )
    releases: defaultdict[str, MessageLog[release_pb2.GetReleaseStatusResponse]] = field(
        default_factory=lambda: defaultdict(MessageLog)
    )
    commands: list[run_pb2.CommandRequest] = field(default_factory=list)
    release_orders: list[ReleaseOrder] = field(default_factory=list)
    refusal: str = ""
    """Sentence with which every order is refused; none is without it."""
    drained: dict[str, frozenset[str]] = field(default_factory=dict)
    """Hosts of the last request, by broker."""
    hosts_in_use: set[str] = field(default_factory=set)
    """Hosts that are not empty."""
    pool_specs: dict[str, str] = field(default_factory=dict)
    """The newest spec that each broker was given."""
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
    async def watch_release(
        self, target: str
    ) -> AsyncIterator[release_pb2.GetReleaseStatusResponse]:
        async for response in self.releases[target].listen():
            yield response

    @override
    async def send_command(self, target: str, request: run_pb2.CommandRequest) -> None:
        self.commands.append(request)

    @override
    async def ask_release(self, target: str, order: ReleaseOrder) -> release_pb2.ReleaseDecision:
        if target in self.unresponsive:
            raise RemoteError(f"{target}: does not answer")
        self.release_orders.append(order)
        if self.refusal:
            return release_pb2.ReleaseDecision(action="Refuse", sentence=self.refusal)
        return release_pb2.ReleaseDecision(action=order.request.action, sentence="as asked")

    @override
    async def drain(self, target: str, hosts: Sequence[str]) -> frozenset[str]:
        if target in self.unresponsive:
            raise RemoteError(f"{target}: does not answer")
        self.drained[target] = frozenset(hosts)
        return self.drained[target] - self.hosts_in_use

    @override
    async def update_pool(self, target: str, pool_json: str) -> None:
        if target in self.unresponsive:
            raise RemoteError(f"{target}: does not answer")
        self.pool_specs[target] = pool_json
