"""The environment API's process: wiring, serving, draining."""

import asyncio

from etude.common.http_server import HttpServer, http_config, open_listener, require_tls
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.envserver.environment_api import api_keys
from etude.envserver.environment_api.app import build_application
from etude.envserver.environment_api.e2b.control_plane import SandboxSize
from etude.envserver.environment_api.mcp_server import McpServer
from etude.envserver.environment_api.pool_client import PoolClient
from etude.envserver.environment_api.sandboxes import ClientSandboxes
from etude.envserver.environment_api.settings import EnvironmentApiSettings


async def serve(settings: EnvironmentApiSettings) -> None:
    """Listen until SIGTERM; the sandboxes end with this process.

    Raises:
        UserError: keys of clients would cross the network unencrypted.
    """
    require_tls(settings.host, settings.port, settings.tls_folder, "the keys of clients")
    pool = PoolClient(settings.brokers)
    sandboxes = ClientSandboxes(pool, settings.workspace, settings.max_sandboxes)
    known = api_keys.load_keys(settings.keys_file)
    mcp = McpServer(known, pool, sandboxes)
    size = SandboxSize(memory_mib=settings.memory_mib, disk_mib=settings.disk_mib)
    app = build_application(known, pool, sandboxes, mcp, size)
    probes = Probes(settings.probe_port, settings.host)
    stop, left = asyncio.Event(), asyncio.Event()
    with open_listener(settings.host, settings.port) as listener:
        server = HttpServer(http_config(app, tls_folder=settings.tls_folder))
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
