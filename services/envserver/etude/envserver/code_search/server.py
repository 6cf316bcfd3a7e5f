"""Process of code search as a service: serving, draining."""

import asyncio

from etude.common.http_server import HttpServer, http_config, open_listener, require_tls
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.envserver.code_search.app import SearchBases, SearchRoutes
from etude.envserver.code_search.settings import CodeSearchSettings
from etude.envserver.host.workspace_sources import load_embedder
from etude.envserver.storage.store_reads import DirectReads


async def serve(settings: CodeSearchSettings) -> None:
    """Listen until SIGTERM.

    Raises:
        UserError: the embedder is not here, or the port would show code unencrypted.
    """
    require_tls(settings.host, settings.port, settings.tls_folder, "the users' code")
    embedder = load_embedder(settings.search, settings.scratch, DirectReads())
    app = SearchRoutes(SearchBases(embedder)).build()
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    with open_listener(settings.host, settings.port) as listener:
        server = HttpServer(http_config(app, tls_folder=settings.tls_folder))
        with shutdown_signals(stop):
            await probes.start()
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
            probes.ready = True
            await stop.wait()
            probes.ready = False
            server.should_exit = True
            await serving
            await probes.stop()
