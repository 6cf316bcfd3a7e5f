"""The environment API's process: wiring, serving, draining."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from etude.common import serving
from etude.common.probes import Probes
from etude.envserver.edges import keys
from etude.envserver.edges.app import application
from etude.envserver.edges.mcp_tools import McpEdge
from etude.envserver.edges.patience import PatientProtocol
from etude.envserver.edges.pool import Pool
from etude.envserver.edges.sandboxes import Sandboxes
from etude.envserver.edges.settings import EdgeSettings

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


async def serve(settings: EdgeSettings) -> None:
    """Listen until SIGTERM; the sandboxes end with this process."""
    pool = Pool(settings.broker_target)
    sandboxes = Sandboxes(pool, settings.workspace, settings.max_sandboxes)
    known = keys.load(settings.keys_file)
    mcp = McpEdge(known, pool, sandboxes)
    app = application(known, pool, sandboxes, mcp, memory_mib=settings.memory_mib)
    probes = Probes(settings.probe_port, settings.host)
    stop, left = asyncio.Event(), asyncio.Event()
    with listening(settings.host, settings.port) as listener:
        server = _Server(config(app))
        with serving.shutdown_signals(stop):
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


def config(app: ASGIApp) -> uvicorn.Config:
    """Configuration of the HTTP server."""
    # Neither log may show an address, which may hold a key.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        http=PatientProtocol,
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
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a listening socket; fails immediately if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listener:
        yield listener
