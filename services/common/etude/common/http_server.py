"""HTTP server of a service: uvicorn with limits on time and size of requests.

Only services that have Starlette and uvicorn import this.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""From a connection's start, or from the first byte of a request, to the end of its headers."""
BODY_S = 60.0
"""For the whole of a body: 8 MiB at 140 KiB a second."""
SEND_S = 60.0
"""For one piece of a response; slower clients are disconnected."""
MAX_CONNECTIONS = 1_000
KEEP_ALIVE_S = 30
DRAIN_S = 5
_BACKLOG = 256


class HeaderTimeoutProtocol(H11Protocol):
    """Closes connections that send their headers too slowly; uvicorn has no such limit."""

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    @override
    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and self._timer is None:
            self._start_timer()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HttpServer(uvicorn.Server):
    """Leaves signals to the process."""

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_config(app: ASGIApp, *, tls_folder: Path | None = None) -> uvicorn.Config:
    """Configuration of the HTTP server, with TLS by a folder's tls.crt and tls.key."""
    # Neither log may show an address, which may hold a key.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        http=HeaderTimeoutProtocol,
        lifespan="off",
        # Addresses hold the keys of clients that can send no header.
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
        h11_max_incomplete_event_size=64 << 10,
        ws_max_size=1 << 20,
        ssl_certfile=None if tls_folder is None else tls_folder / "tls.crt",
        ssl_keyfile=None if tls_folder is None else tls_folder / "tls.key",
    )


@contextlib.contextmanager
def open_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Open a listening socket; fails immediately if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listener:
        yield listener


@dataclass(slots=True)
class RequestLimits:
    """ASGI middleware that limits size and time of each request."""

    app: ASGIApp
    max_body_bytes: Callable[[str], int]
    """Limit of the body for a path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request within the limits."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        most = self.max_body_bytes(scope["path"])
        await self.app(scope, _Body(receive, most).receive, send_in_time)


@dataclass(slots=True)
class _Body:
    """A request body, limited in size and time."""

    inner: Receive
    most: int
    num_bytes: int = 0
    is_complete: bool = False
    ends_s: float = 0.0

    async def receive(self) -> Message:
        """The next piece.

        Raises:
            HTTPException: it is too much, or takes too long.
        """
        if self.is_complete:
            return await self.inner()
        self.ends_s = self.ends_s or asyncio.get_running_loop().time() + BODY_S
        try:
            async with asyncio.timeout_at(self.ends_s):
                message = await self.inner()
        except TimeoutError:
            raise HTTPException(408, f"the body took longer than {BODY_S:g} s") from None
        self.num_bytes += len(message.get("body", b""))
        if self.num_bytes > self.most:
            raise HTTPException(413, f"the body is larger than {self.most} bytes")
        self.is_complete = not message.get("more_body", False)
        return message
