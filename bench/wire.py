"""What certificates cost: calls and connections with mutual TLS against the same in the clear.

`python bench/wire.py`: server and clients share one process, as both sides of a call pay, and
processor time is counted beside time, which neighbours on the machine stretch.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import pki

from etude.common.rpc.channels import dial
from etude.common.rpc.server import Server
from etude.common.tls.credentials import Credentials
from etude.common.tls.identity import Identity
from etude.common.tls.targets import named_target
from etude.common.tls.transport import PLAINTEXT, TransportSecurity, security_from_setting
from etude.v1 import rewards_pb2, rewards_pb2_grpc

ROUNDS = 9
CALLS = 4_000
AT_ONCE = 32
HANDSHAKES = 100
REQUEST = rewards_pb2.ScoreRequest(group_id="x" * 1_000)
TIMEOUT_S = 60
OUT = Path(__file__).parent / "out" / "wire.json"


class Echo(rewards_pb2_grpc.RewardServiceServicer):
    """Answers at once."""

    @override
    async def Score(self, request: Any, context: Any) -> rewards_pb2.ScoreResponse:
        return rewards_pb2.ScoreResponse(rubric_digest=request.group_id)

    @override
    async def Describe(self, request: Any, context: Any) -> rewards_pb2.DescribeResponse:
        return rewards_pb2.DescribeResponse()


class Sides(NamedTuple):
    """How both ends of a connection speak."""

    server: TransportSecurity
    client: TransportSecurity


class Round(NamedTuple):
    """One round over one wire."""

    call_us: float
    """Per call, with AT_ONCE of them at once."""
    call_cpu_us: float
    connect_ms: float
    """From no connection to the first answer."""
    connect_cpu_ms: float


async def calls(target: str, wire: TransportSecurity) -> None:
    """CALLS of them over one connection."""
    async with dial(target, security=wire) as channel:
        stub = rewards_pb2_grpc.RewardServiceStub(channel)

        async def caller() -> None:
            for _ in range(CALLS // AT_ONCE):
                await stub.Score(REQUEST, timeout=TIMEOUT_S)

        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))


async def connections(target: str, wire: TransportSecurity) -> None:
    """HANDSHAKES of them, one after the other, with a call each."""
    for _ in range(HANDSHAKES):
        async with dial(target, security=wire) as channel:
            await rewards_pb2_grpc.RewardServiceStub(channel).Score(REQUEST, timeout=TIMEOUT_S)


async def measured(sides: Sides) -> Round:
    """One round."""
    server = Server(["etude.v1.RewardService"], security=sides.server)
    rewards_pb2_grpc.add_RewardServiceServicer_to_server(Echo(), server.grpc_server)
    await server.start()
    target = named_target("r-rewards.lab.svc", f"127.0.0.1:{server.port}")
    found: list[float] = []
    try:
        for work, number, unit in ((calls, CALLS, 1e6), (connections, HANDSHAKES, 1e3)):
            began, began_cpu = time.perf_counter(), time.process_time()
            await work(target, sides.client)
            took = time.perf_counter() - began, time.process_time() - began_cpu
            found += [unit * seconds / number for seconds in took]
    finally:
        await server.stop(0)
    return Round(*found)


def certified(folder: Path, authority: pki.Authority, role: str) -> TransportSecurity:
    """A part's own certificate."""
    identity = Identity(domain="etude.dev", namespace="lab", run="r", role=role)
    return TransportSecurity(
        credentials=Credentials(pki.write(folder / role, authority.issue(identity)))
    )


async def main() -> None:
    """Rounds in turns, so that a neighbour disturbs both alike; the first of each warms up."""
    plain, tls = list[Round](), list[Round]()
    with tempfile.TemporaryDirectory() as name:
        authority = pki.Authority()
        parts = (certified(Path(name), authority, role) for role in ("rewards", "trainer"))
        clear, certain = (
            Sides(security_from_setting(PLAINTEXT), security_from_setting(PLAINTEXT)),
            Sides(*parts),
        )
        for _ in range(1 + ROUNDS):
            plain.append(await measured(clear))
            tls.append(await measured(certain))
    show(plain[1:], tls[1:])


def show(plain: Sequence[Round], tls: Sequence[Round]) -> None:
    """A table, and the same as JSON: medians, and the median of what each pair of rounds costs."""
    result = {}
    table = Table("", "in the clear", "mutual TLS", "ratio")
    for place, name in enumerate(Round._fields):
        pairs = [(one[place], other[place]) for one, other in zip(plain, tls, strict=True)]
        before, after = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(other / one for one, other in pairs)
        result[name] = {"plaintext": before, "mtls": after, "ratio": ratio}
        table.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{ratio:.2f}")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    Console().print(table)


if __name__ == "__main__":
    asyncio.run(main())
