"""gRPC channel that presents the newest certificate; gRPC's own keeps its first one."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakSet

import grpc
from typing_extensions import override

from etude.common.tls import handshake_errors, metrics
from etude.common.tls.credentials import Credentials, for_channel
from etude.common.tls.material import TlsMaterial
from etude.common.tls.targets import TlsTarget

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, int | str]]
LONGEST_CALL_S = 86_400.0
"""Calls that run when the certificate changes end on the connection that they began on."""


@dataclass(slots=True, eq=False)
class RotatingChannel(grpc.aio.Channel):
    """Reconnects when the files of its certificate change; running calls continue."""

    target: TlsTarget
    credentials: Credentials
    options: Options
    _shown: TlsMaterial | None = field(default=None, init=False)
    _inner: grpc.aio.Channel | None = field(default=None, init=False)
    _watching: asyncio.Task[None] | None = field(default=None, init=False)
    _said: str = field(default="", init=False)
    _ending: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _calls: "WeakSet[grpc.aio.Call]" = field(default_factory=WeakSet, init=False)

    def newest(self) -> grpc.aio.Channel:
        """The connection for a call that begins now."""
        current = self.credentials.current()
        if self._inner is None or self._shown is not current:
            self._retire()
            self._shown = current
            name = ("grpc.ssl_target_name_override", self.target.server_name)
            self._inner = grpc.aio.secure_channel(
                self.target.address, for_channel(current), options=[*self.options, name]
            )
            watch = self._watch(self._inner)
            self._watching = asyncio.create_task(watch, name=f"tls-{self.target.address}")
        return self._inner

    def _retire(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._inner is not None:
            ending = asyncio.create_task(
                self._inner.close(LONGEST_CALL_S), name=f"end-{self.target.address}"
            )
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Log why a peer cannot be reached if the reason is a certificate."""
        state = channel.get_state()
        while state is not grpc.ChannelConnectivity.SHUTDOWN:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await self._explain()
            await channel.wait_for_state_change(state)
            state = channel.get_state()

    async def _explain(self) -> None:
        why = await handshake_errors.handshake_error(self.credentials, self.target)
        if why:
            metrics.REFUSED.labels("client").inc()
        if why and why != self._said:
            log.warning("TLS handshake with %s fails: %s", self.target.address, why)
        self._said = why

    @override
    async def __aenter__(self) -> Self:
        return self

    @override
    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @override
    async def close(self, grace: float | None = None) -> None:
        if self._watching is not None:
            self._watching.cancel()
        is_failing = grpc.ChannelConnectivity.TRANSIENT_FAILURE
        if self._inner is not None and self._inner.get_state() is is_failing and not self._said:
            # A client that dials for each call would never learn the cause of a failure.
            await self._explain()
        if self._inner is not None:
            await self._inner.close(grace)
        # gRPC cannot close a channel again that it closes with patience: its calls would hang.
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._ending)

    @override
    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.newest().get_state(try_to_connect)

    @override
    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.newest().wait_for_state_change(last_observed_state)

    @override
    async def channel_ready(self) -> None:
        await self.newest().channel_ready()

    @override
    def unary_unary(self, *path: Any, **kinds: Any) -> Any:
        return self._bind_newest(lambda channel: channel.unary_unary(*path, **kinds))

    @override
    def unary_stream(self, *path: Any, **kinds: Any) -> Any:
        return self._bind_newest(lambda channel: channel.unary_stream(*path, **kinds))

    @override
    def stream_unary(self, *path: Any, **kinds: Any) -> Any:
        return self._bind_newest(lambda channel: channel.stream_unary(*path, **kinds))

    @override
    def stream_stream(self, *path: Any, **kinds: Any) -> Any:
        return self._bind_newest(lambda channel: channel.stream_stream(*path, **kinds))

    def _bind_newest(self, bind: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        """A method of a stub, bound to whichever connection is newest when it is called."""
        bound: list[tuple[grpc.aio.Channel, Any]] = []

        def call(*words: Any, **options: Any) -> Any:  # noqa: ANN401
            channel = self.newest()
            if not bound or bound[0][0] is not channel:
                bound[:] = [(channel, bind(channel))]
            made = bound[0][1](*words, **options)
            self._calls.add(made)
            return made

        return call
