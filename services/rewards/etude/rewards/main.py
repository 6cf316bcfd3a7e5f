"""The reward service's process: settings, wiring, serve."""

import asyncio

from etude.common import process
from etude.rewards.settings import Settings

DRAIN_S = 30.0


def main() -> None:
    """Serve rewards until SIGTERM."""
    process.start_process()
    settings = process.read_settings("etude-rewards", Settings.from_env)
    process.run_service("etude-rewards", serve(settings))


async def serve(settings: Settings) -> None:
    """Listen, serve until SIGTERM, let running calls end."""
    from etude.common import role_inputs, telemetry
    from etude.common.probes import Probes
    from etude.common.rpc import server as rpc_server
    from etude.rewards import wiring
    from etude.v1 import rewards_pb2, rewards_pb2_grpc

    run = role_inputs.read_run(settings.run_file)
    provider = telemetry.setup_tracing(
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
    with process.shutdown_signals(stop):
        await probes.start()
        await server.start()
        await server.set_ready()
        probes.ready = True
        await stop.wait()
        probes.ready = False
        await server.stop(DRAIN_S)
        await parts.sandboxes.close()
        await probes.stop()
    provider.shutdown()


if __name__ == "__main__":
    main()
