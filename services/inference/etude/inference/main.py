"""The inference role's process: settings, wiring, serve."""

import asyncio
import logging
import socket
import sys
from typing import NoReturn

from etude.common.errors import EtudeError, UserError
from etude.inference.settings import Settings

CONFIGURATION_ERROR = 78
"""The exit code that tells the operator not to try again (EX_CONFIG)."""


def main() -> None:
    """Serve the run's policy until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(serve(Settings.from_env()))
    except UserError as error:
        _end(str(error), CONFIGURATION_ERROR)
    except (EtudeError, OSError, RuntimeError) as error:
        _end(str(error), 1)


def _end(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"etude-inference: {message}\n")
    sys.exit(code)


async def serve(settings: Settings) -> None:
    """Check everything cheap, build the engine, then answer until SIGTERM."""
    from etude.common import files, serving, telemetry
    from etude.common.probes import Probes
    from etude.inference.building import build_engine, leave
    from etude.inference.settings import engine_options

    run = files.read_run(settings.run_file)
    options = engine_options(run, scratch=settings.scratch, threads=settings.threads)
    for port in (settings.port, settings.http_port):
        # The engine takes many seconds to build: a port in use is said before.
        socket.create_server((settings.host, port)).close()
    provider = telemetry.setup(
        "etude-inference",
        otlp_endpoint=run.spec.observability.otlp_endpoint,
        traces_file=settings.traces_file,
    )
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    with serving.shutdown_signals(stop):
        await probes.start()
        replica = await build_engine(options, stop)
        if replica is not None:
            from etude.inference.wiring import Role

            role = Role(settings=settings, run=run, replica=replica, probes=probes)
            await role.start()
            try:
                await role.run_until(stop)
            finally:
                await role.stop()
                replica.shutdown()
        await probes.stop()
        provider.shutdown()
        leave()


if __name__ == "__main__":
    main()
