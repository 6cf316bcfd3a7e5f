"""The environment API's process: wiring, serving, draining."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.envserver.environment_api import api_keys
from etude.envserver.environment_api.app import build_application
from etude.envserver.environment_api.mcp_server import McpServer
from etude.envserver.environment_api.pool_client import PoolClient
from etude.envserver.environment_api.sandboxes import ClientSandboxes
from etude.envserver.environment_api.settings import EnvironmentApiSettings

HEAD_S = 10.0
"""From a connection's start, or from the first byte of a request, to the end of its headers."""


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


MAX_CONNECTIONS = 1_000
KEEP_ALIVE_S = 30
DRAIN_S = 5
_BACKLOG = 256


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: EnvironmentApiSettings) -> None:
    """Listen until SIGTERM; the sandboxes end with this process."""
    pool = PoolClient(settings.broker_target)
    sandboxes = ClientSandboxes(pool, settings.workspace, settings.max_sandboxes)
    known = api_keys.load_keys(settings.keys_file)
    mcp = McpServer(known, pool, sandboxes)
    app = build_application(known, pool, sandboxes, mcp, memory_mib=settings.memory_mib)
    probes = Probes(settings.probe_port, settings.host)
    stop, left = asyncio.Event(), asyncio.Event()
    with open_listener(settings.host, settings.port) as listener:
        server = _Server(http_config(app))
        with shutdown_signals(stop):
            await probes.start()
            async with mcp.running(), asyncio.TaskGroup() as group:
                group.create_task(server.serve(sockets=[listener]), name="http")
                group.create_task(sandboxes.run(stop), name="sandboxes")
                renewing = group.create_task(pool.run(left), name="leases")
                probes.ready = True
                await stop.wait()
                probes.ready = False
                server.should_exit = True
                await sandboxes.close()
                left.set()
                await renewing
            await probes.stop()


def http_config(app: ASGIApp) -> uvicorn.Config:
    """Configuration of the HTTP server."""
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
    )


@contextlib.contextmanager
def open_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Open a listening socket; fails immediately if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listener:
        yield listener
