"""The reward service's process: settings, wiring, serve."""

import asyncio
import logging
import sys
from typing import NoReturn

from etude.common.errors import UserError
from etude.common.process import end_at_once_when_told
from etude.rewards.settings import Settings

CONFIGURATION_ERROR = 78
"""Exit code that tells the operator not to retry (EX_CONFIG)."""

DRAIN_S = 30.0


def main() -> None:
    """Serve rewards until SIGTERM."""
    end_at_once_when_told()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = Settings.from_env()
    except KeyError as error:
        _end(f"{error.args[0]} is not set", CONFIGURATION_ERROR)
    except ValueError as error:
        _end(str(error), CONFIGURATION_ERROR)
    try:
        asyncio.run(serve(settings))
    except UserError as error:
        _end(str(error), CONFIGURATION_ERROR)
    except OSError as error:
        _end(str(error), 1)


def _end(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"etude-rewards: {message}\n")
    sys.exit(code)


async def serve(settings: Settings) -> None:
    """Listen, serve until SIGTERM, let running calls end."""
    from etude.common import role_inputs, telemetry
    from etude.common.probes import Probes
    from etude.common.rpc import server as rpc_server
    from etude.rewards import wiring
    from etude.v1 import rewards_pb2, rewards_pb2_grpc

    run = role_inputs.read_run(settings.run_file)
    provider = telemetry.setup(
        "etude-rewards",
        otlp_endpoint=run.spec.observability.otlp_endpoint,
        traces_file=settings.traces_file,
    )
    parts = wiring.assemble(run, settings)
    name = rewards_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
    server = rpc_server.Server([name], settings.host, settings.port)
    rewards_pb2_grpc.add_RewardServiceServicer_to_server(parts.service, server.grpc_server)
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    with rpc_server.shutdown_signals(stop):
        await probes.start()
        await server.start()
        await server.ready()
        probes.ready = True
        await stop.wait()
        probes.ready = False
        await server.stop(DRAIN_S)
        await parts.sandboxes.close()
        await probes.stop()
    provider.shutdown()


if __name__ == "__main__":
    main()
