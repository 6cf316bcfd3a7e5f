"""The inference role's process: settings, wiring, serve."""

import asyncio
import contextlib
import socket
import sys
from typing import NoReturn

from etude.common import process
from etude.common.errors import EtudeError, UserError
from etude.common.role_inputs import ResolvedRun
from etude.inference.engine.build import build_engine, exit_process
from etude.inference.settings import Settings


def main() -> None:
    """Serve the run's policy until SIGTERM."""
    process.start_process()
    asyncio.run(_serve_and_leave())


async def _serve_and_leave() -> NoReturn:
    # asyncio waits for threads when it ends, so errors are reported before.
    code = 0
    try:
        await serve(Settings.from_env())
    except UserError as error:
        code = _report(error, process.EXIT_CONFIGURATION)
    except (EtudeError, OSError, RuntimeError) as error:
        code = _report(error, 1)
    exit_process(code)


def _report(error: Exception, code: int) -> int:
    sys.stderr.write(f"etude-inference: {error}\n")
    return code


async def _await_model(run: ResolvedRun, settings: Settings) -> ResolvedRun:
    """The run with the copy of its model once the trainer has made it, alive for the kubelet."""
    from etude.common.model_sources.run_model import needs_copy, with_model_folder
    from etude.common.probes import Probes

    if not needs_copy(run.spec.model.key):
        return run
    probes = Probes(settings.probe_port, settings.host)
    await probes.start()
    try:
        return await asyncio.to_thread(with_model_folder, run)
    finally:
        await probes.stop()


async def serve(settings: Settings) -> None:
    """Check everything that is cheap, build the engine, then serve until SIGTERM."""
    from etude.common import role_inputs, stores, telemetry
    from etude.common.probes import Probes
    from etude.inference.settings import engine_options
    from etude.inference.updates.store_access import require_readable_store

    run = await _await_model(role_inputs.read_run(settings.run_file), settings)
    options = engine_options(run, scratch=settings.scratch, threads=settings.threads)
    for port in (settings.port, settings.http_port):
        # Building the engine takes many seconds: report a port in use before.
        socket.create_server((settings.host, port)).close()
    require_readable_store(stores.open_run_store(run.spec.storage.uri, run.spec.storage))
    provider = telemetry.setup_tracing(
        "etude-inference",
        otlp_endpoint=run.spec.observability.otlp_endpoint,
        traces_file=settings.traces_file,
    )
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    with process.shutdown_signals(stop):
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(provider.shutdown)
            closing.push_async_callback(probes.stop)
            await probes.start()
            replica = await build_engine(options, stop)
            if replica is None:
                return
            from etude.inference.wiring import InferenceRole

            closing.callback(replica.shutdown)
            role = InferenceRole(settings=settings, run=run, replica=replica, probes=probes)
            await role.start()
            closing.push_async_callback(role.stop)
            await role.run_until(stop)


if __name__ == "__main__":
    main()
