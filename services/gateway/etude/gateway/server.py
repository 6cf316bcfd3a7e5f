"""The gateway's process: listening, serving, draining."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from typing_extensions import override

from etude.common.errors import Problem, UserError
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.common.tls.transport import process_security
from etude.gateway.app import GatewayApp
from etude.gateway.settings import Route, Settings
from etude.gateway.wiring import Parts, assemble, load_chat_format

log = logging.getLogger(__name__)

DRAIN_S = 120
"""Running turns may go on for so long after SIGTERM."""
FLUSH_S = 30.0
"""For records that wait when everything is served."""
MAX_CONNECTIONS = 4_000
KEEP_ALIVE_S = 75
_BACKLOG = 1_024


class SignalFreeServer(uvicorn.Server):
    """Leaves signals to the process."""

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(route: Route, settings: Settings) -> None:
    """Listen until SIGTERM, let running turns end, make their records durable."""
    parts = assemble(route, settings, load_chat_format(route, settings.scratch))
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    with open_listener(settings) as listener:
        server = SignalFreeServer(http_config(parts.app, settings.tls_folder))
        with shutdown_signals(stop):
            await probes.start()
            async with asyncio.TaskGroup() as group:
                http = group.create_task(server.serve(sockets=[listener]), name="http")
                writing = group.create_task(_write_turns(parts), name="turn-log")
                host, port = listener.getsockname()[:2]
                log.info("serving %s on %s port %d", route.model, host, port)
                probes.ready = True
                await stop.wait()
                probes.ready = False
                server.should_exit = True
                await http
                await _finish_turns(parts, writing)
            for connection in parts.connections:
                await connection.close()
            await probes.stop()


async def _write_turns(parts: Parts) -> None:
    if parts.log is not None:
        await parts.log.run()


async def _finish_turns(parts: Parts, writing: "asyncio.Task[None]") -> None:
    """Make the last records durable, for as long as a pod has."""
    if parts.log is None:
        return
    parts.log.close()
    await asyncio.wait({writing}, timeout=FLUSH_S)
    if not writing.done():
        log.error("%d bytes of records are lost: the store is away", parts.log.waiting_bytes)
        writing.cancel()


def http_config(app: GatewayApp, tls_folder: Path | None) -> uvicorn.Config:
    """Configuration of the HTTP server."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
        ssl_certfile=None if tls_folder is None else tls_folder / "tls.crt",
        ssl_keyfile=None if tls_folder is None else tls_folder / "tls.key",
    )


@contextlib.contextmanager
def open_listener(settings: Settings) -> Iterator[socket.socket]:
    """Open a listening socket, which other processes of the gateway share.

    Raises:
        OSError: another program has the port.
        UserError: keys and conversations would leave the machine unencrypted.
    """
    if settings.tls_folder is None:
        address = f"{settings.host}:{settings.port}"
        process_security().require_private(address, "what is served")
    elif not (settings.tls_folder / "tls.key").is_file():
        fix = "mount a folder with tls.crt and tls.key"
        raise UserError(Problem("InvalidTls", "has no tls.key", str(settings.tls_folder), fix))
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.create_server(
        (settings.host, settings.port), family=family, backlog=_BACKLOG, reuse_port=True
    ) as listener:
        yield listener
