"""The gateway's process: listening, serving, draining."""

import asyncio
import logging

from etude.common.http_server import HttpServer, http_config, open_listener, require_tls
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
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


async def serve(route: Route, settings: Settings) -> None:
    """Listen until SIGTERM, let running turns end, make their records durable."""
    require_tls(settings.host, settings.port, settings.tls_folder, "what is served")
    parts = assemble(route, settings, load_chat_format(route, settings.scratch))
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    config = http_config(
        parts.app,
        tls_folder=settings.tls_folder,
        max_connections=MAX_CONNECTIONS,
        keep_alive_s=KEEP_ALIVE_S,
        drain_s=DRAIN_S,
    )
    if parts.canary is not None:
        await parts.canary.start()
    # Other processes of the gateway share the port.
    with open_listener(settings.host, settings.port, backlog=_BACKLOG, is_shared=True) as listener:
        server = HttpServer(config)
        with shutdown_signals(stop):
            await probes.start()
            async with asyncio.TaskGroup() as group:
                http = group.create_task(server.serve(sockets=[listener]), name="http")
                writing = group.create_task(_write_turns(parts), name="turn-log")
                watching = group.create_task(_watch_canary(parts), name="canary-channel")
                lending = group.create_task(_lend_engines(parts), name="lend-engines")
                host, port = listener.getsockname()[:2]
                log.info("serving %s on %s port %d", route.model, host, port)
                probes.ready = True
                await stop.wait()
                probes.ready = False
                server.should_exit = True
                await http
                await _finish_turns(parts, writing)
                watching.cancel()
                lending.cancel()
            for connection in parts.connections:
                await connection.close()
            await probes.stop()


async def _write_turns(parts: Parts) -> None:
    if parts.log is not None:
        await parts.log.run()


async def _watch_canary(parts: Parts) -> None:
    if parts.canary is not None:
        await parts.canary.run()


async def _lend_engines(parts: Parts) -> None:
    if parts.lender is not None:
        await parts.lender.run()


async def _finish_turns(parts: Parts, writing: "asyncio.Task[None]") -> None:
    """Make the last records durable, for as long as a pod has."""
    recorder = parts.app.service.recorder
    if parts.log is None or recorder is None:
        return
    # A key of a user is waited for at most as long as a question has.
    await recorder.finish()
    parts.log.close()
    await asyncio.wait({writing}, timeout=FLUSH_S)
    if not writing.done():
        log.error("%d bytes of records are lost: the store is away", parts.log.waiting_bytes)
        writing.cancel()
