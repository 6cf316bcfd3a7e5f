"""What certificates cost: calls and handshakes with mutual TLS against the same in the clear.

`python bench/wire.py`: server and clients share one process, as both sides of a call pay.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import pki

from etude.common.channels import dial
from etude.common.serving import Server
from etude.common.tls.credentials import Credentials
from etude.common.tls.identity import Identity
from etude.common.tls.targets import named
from etude.common.tls.wire import PLAINTEXT, Wire, told
from etude.v1 import rewards_pb2, rewards_pb2_grpc

ROUNDS = 5
CALLS = 2_000
AT_ONCE = 32
HANDSHAKES = 50
OUT = Path(__file__).parent / "out" / "wire.json"


class Echo(rewards_pb2_grpc.RewardServiceServicer):
    """Answers at once."""

    @override
    async def Score(self, request: Any, context: Any) -> rewards_pb2.ScoreResponse:
        return rewards_pb2.ScoreResponse(rubric_digest=request.group_id)

    @override
    async def Describe(self, request: Any, context: Any) -> rewards_pb2.DescribeResponse:
        return rewards_pb2.DescribeResponse()


class Round(NamedTuple):
    """One round over one wire."""

    calls_per_s: float
    p99_ms: float
    connect_ms: float
    """From no connection to the first answer, median."""


def certified(folder: Path, authority: pki.Authority, role: str) -> Wire:
    """A part's own certificate."""
    identity = Identity(domain="etude.dev", namespace="lab", run="r", role=role)
    return Wire(credentials=Credentials(pki.write(folder / role, authority.issue(identity))))


async def measured(server_wire: Wire, client_wire: Wire) -> Round:
    """One round."""
    server = Server(["etude.v1.RewardService"], wire=server_wire)
    rewards_pb2_grpc.add_RewardServiceServicer_to_server(Echo(), server.grpc_server)
    await server.start()
    target = named("r-rewards.lab.svc", f"127.0.0.1:{server.port}")
    request = rewards_pb2.ScoreRequest(group_id="x" * 1_000)
    try:
        connects = []
        for _ in range(HANDSHAKES):
            began = time.perf_counter()
            async with dial(target, wire=client_wire) as channel:
                await rewards_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=30)
                connects.append(time.perf_counter() - began)
        async with dial(target, wire=client_wire) as channel:
            stub = rewards_pb2_grpc.RewardServiceStub(channel)
            times: list[float] = []

            async def caller() -> None:
                for _ in range(CALLS // AT_ONCE):
                    began = time.perf_counter()
                    await stub.Score(request, timeout=30)
                    times.append(time.perf_counter() - began)

            began = time.perf_counter()
            await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
            took_s = time.perf_counter() - began
    finally:
        await server.stop(0)
    p99_s = statistics.quantiles(times, n=100)[98]
    return Round(len(times) / took_s, 1_000 * p99_s, 1_000 * statistics.median(connects))


async def main() -> None:
    """Rounds in turns, so that a neighbour disturbs both alike; medians."""
    with tempfile.TemporaryDirectory() as name:
        authority = pki.Authority()
        parts = [certified(Path(name), authority, role) for role in ("rewards", "trainer")]
        plain, tls = [], []
        for _ in range(ROUNDS):
            plain.append(await measured(told(PLAINTEXT), told(PLAINTEXT)))
            tls.append(await measured(parts[0], parts[1]))
    result = {"plaintext": _median(plain), "mtls": _median(tls)}
    ratios = [one.calls_per_s / other.calls_per_s for one, other in zip(tls, plain, strict=True)]
    result["calls_ratio"] = {"median": round(statistics.median(ratios), 3)}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def _median(rounds: list[Round]) -> dict[str, float]:
    columns = zip(*rounds, strict=True)
    return {
        name: round(statistics.median(column), 2)
        for name, column in zip(Round._fields, columns, strict=True)
    }


if __name__ == "__main__":
    asyncio.run(main())
