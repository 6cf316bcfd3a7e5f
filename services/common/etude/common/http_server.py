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

import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from etude.common.errors import Problem, UserError
from etude.common.tls.targets import REASON, is_loopback
from etude.common.tls.transport import PLAINTEXT, VARIABLE, process_security

HEAD_S = 10.0
"""From a connection's start, or from the first byte of a request, to the end of its headers."""
MAX_HEAD_BYTES = 64 << 10
_VERSIONS = frozenset(("1.0", "1.1"))
"""The parser takes a request of version 0.9, a line without headers, too."""
BODY_S = 60.0
"""For the whole of a body: 8 MiB at 140 KiB a second."""
SEND_S = 60.0
"""For one piece of a response; slower clients are disconnected."""
MAX_CONNECTIONS = 1_000
KEEP_ALIVE_S = 30
DRAIN_S = 5
_BACKLOG = 256


class HeadLimitProtocol(HttpToolsProtocol):
    """Closes connections whose headers are too slow or too large; uvicorn has no such limits."""

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None
    _head_bytes: int | None = 0
    """Received of unfinished headers; None between them."""

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.close()

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._timer is None:
            self._start_timer()

    @override
    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in _VERSIONS:
            raise ValueError("no version of HTTP that has headers")  # the parser's caller says 400
        self._head_bytes = None
        self._stop_timer()
        super().on_headers_complete()

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


def http_config(
    app: ASGIApp,
    *,
    tls_folder: Path | None = None,
    max_connections: int = MAX_CONNECTIONS,
    keep_alive_s: int = KEEP_ALIVE_S,
    drain_s: int = DRAIN_S,
) -> uvicorn.Config:
    """Configuration of the HTTP server, with TLS by a folder's tls.crt and tls.key."""
    # Neither log may show an address, which may hold a key.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        http=HeadLimitProtocol,
        lifespan="off",
        # Addresses hold the keys of clients that can send no header.
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=drain_s,
        ws_max_size=1 << 20,
        ssl_certfile=None if tls_folder is None else tls_folder / "tls.crt",
        ssl_keyfile=None if tls_folder is None else tls_folder / "tls.key",
    )


def require_tls(host: str, port: int, tls_folder: Path | None, what: str) -> None:
    """Refuse to listen where what is sent would leave the machine unencrypted.

    Args:
        host: address to listen on.
        port: of TCP.
        tls_folder: has tls.crt and tls.key.
        what: what would leave, as sentences have it.

    Raises:
        UserError: naming the address, or the folder that has no key.
    """
    if tls_folder is None:
        security = process_security()
        # Certificates of RPC do not encrypt this port.
        allows_plaintext = security.credentials is None and security.allows_remote_plaintext
        if not allows_plaintext and not is_loopback(f"{host}:{port}"):
            fix = (
                f"give the service a folder with tls.crt and tls.key, or set {VARIABLE}={PLAINTEXT}"
            )
            where = f"{host}:{port}"
            raise UserError(Problem(REASON, f"{what} would not be encrypted", where, fix))
    elif not (tls_folder / "tls.key").is_file():
        fix = "mount a folder with tls.crt and tls.key"
        raise UserError(Problem("InvalidTls", "has no tls.key", str(tls_folder), fix))


@contextlib.contextmanager
def open_listener(
    host: str, port: int, *, backlog: int = _BACKLOG, is_shared: bool = False
) -> Iterator[socket.socket]:
    """Open a listening socket; fails immediately if the port is taken.

    Args:
        host: address.
        port: of TCP; 0 for any.
        backlog: connections that may wait.
        is_shared: True if several processes listen on it, and the kernel shares connections out.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(
        (host, port), family=family, backlog=backlog, reuse_port=is_shared
    ) as listener:
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
