"""Where attacks happen: a pool of real processes, two leases, and canaries.

An attack says what it reached; the arena says what was harmed whatever the attack believes.
"""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import Processes

from etude.v1 import environments_pb2

REACHED = "REACHED-WHAT-IT-SHOULD-NOT"
"""A script prints it when something worked that must not."""
GONE = {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE}
"""How a lease answers that its own attack has ended: its rollout is masked."""
RELEASE_LIMIT_S = 60


@dataclass(slots=True)
class Arena:
    """One attack's surroundings."""

    processes: Processes
    pool: Pool
    lease: environments_pb2.Lease
    neighbour: environments_pb2.Lease
    host: Path
    """A folder of the host that nobody in an environment may reach."""
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    """The neighbour's and the host's: no attacker may ever read it."""
    _calls: int = 0

    async def sh(self, command: str) -> str:
        """What the attacker's shell prints, or why there is none."""
        return await self.tool("run_terminal", command=command, timeout="10")

    async def tool(self, name: str, **arguments: str) -> str:
        """One tool call of the attacker.

        Raises:
            AioRpcError: the node fails in another way than by a lost lease.
        """
        try:
            return await self.call(self.lease, name, arguments)
        except grpc.aio.AioRpcError as error:
            if error.code() not in GONE:
                raise
            return f"lost: {error.details()}"

    async def prepare(self) -> None:
        """Put the canaries there."""
        (self.host / "secret").write_text(self.secret)
        said = await self.call(
            self.neighbour,
            "run_terminal",
            {"command": f"echo {self.secret} > canary; echo {self.secret} > /tmp/canary"},
        )
        assert "rror" not in said, said

    async def harm(self) -> str:
        """What the attack has done to anybody else; empty if nothing."""
        for role in ("node", "broker"):
            if self.processes.running[role].poll() is not None:
                return f"the {role} has ended: {self.processes.log(role)[-500:]}"
        if (self.host / "secret").read_text() != self.secret:
            return "the host's file has another content"
        if sorted(path.name for path in self.host.iterdir()) != ["secret"]:
            return "the host's folder has other files"
        try:
            said = await self.call(
                self.neighbour, "run_terminal", {"command": "cat canary /tmp/canary"}
            )
        except grpc.aio.AioRpcError as error:
            return f"the neighbour was lost: {error.details()}"
        kept = "canary" if self.lease.driver == "process" else "canary /tmp/canary"
        wanted = [self.secret] * len(kept.split())
        found = [line for line in said.splitlines() if line == self.secret]
        return "" if found == wanted else f"the neighbour reads {said[:200]!r}"

    async def end(self) -> None:
        """Both leases end, whatever happened in them."""
        ids = [self.lease.lease_id, self.neighbour.lease_id]
        request = environments_pb2.ReleaseLeasesRequest(lease_ids=ids)
        async with asyncio.timeout(RELEASE_LIMIT_S):
            await self.pool.broker.ReleaseLeases(request)

    async def call(
        self, lease: environments_pb2.Lease, name: str, arguments: Mapping[str, str]
    ) -> str:
        """One tool call in a lease."""
        self._calls += 1
        (said,) = await self.pool.turn(lease, (f"call-{self._calls}", name, arguments))
        return said
