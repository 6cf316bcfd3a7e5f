"""What an empty call costs a gRPC server of ours: no broker can answer for less."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from typing_extensions import override

from broker_bench.processes import free_port, process_cpu_s
from etude.common.rpc import channels
from etude.common.rpc import server as rpc_server
from etude.v1 import environments_pb2, environments_pb2_grpc

AT_ONCE = 32


class Echo(environments_pb2_grpc.EnvNodeServiceServicer):
    """Answers with nothing."""

    @override
    async def CloseEnvironments(
        self, request: environments_pb2.CloseEnvironmentsRequest, context: object
    ) -> environments_pb2.CloseEnvironmentsResponse:
        return environments_pb2.CloseEnvironmentsResponse()


async def serve(port: int) -> None:
    """Until killed."""
    server = rpc_server.Server([], port=port)
    echo = Echo()  # type: ignore[abstract]  # the other calls never come
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(echo, server.grpc_server)
    await server.start()
    await asyncio.Event().wait()


def start(port: int, core: int) -> "subprocess.Popen[bytes]":
    """The server as a process on one core."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "broker_bench.echo", str(port)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1])


async def calls_per_cpu_s(seconds: float, core: int) -> float:
    """Empty calls that a server process answers with one second of CPU time."""
    port = free_port()
    process = start(port, core)
    calls = 0
    async with channels.dial(f"127.0.0.1:{port}", max_backoff_ms=200) as channel:
        stub = environments_pb2_grpc.EnvNodeServiceStub(channel)
        empty = environments_pb2.CloseEnvironmentsRequest()
        await stub.CloseEnvironments(empty, wait_for_ready=True, timeout=60)
        until_s, cpu_s = time.perf_counter() + seconds, process_cpu_s(process.pid)

        async def client() -> None:
            nonlocal calls
            while time.perf_counter() < until_s:
                await stub.CloseEnvironments(empty)
                calls += 1

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        cpu_s = process_cpu_s(process.pid) - cpu_s
    process.kill()
    process.wait()
    return calls / cpu_s


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
