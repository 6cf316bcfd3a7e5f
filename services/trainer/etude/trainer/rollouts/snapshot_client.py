"""The state of one leased environment, for whoever controls it: saved, put back, paused."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from etude.trainer.rollouts.engine_client import Outage
from etude.v1 import environment_state_pb2, environment_state_pb2_grpc, environments_pb2

_T = TypeVar("_T")


@dataclass(slots=True)
class LeaseStates:
    """Calls to the node that holds a lease, each repeated while the node is away.

    Every method raises UnavailableError when the node stayed away, and AioRpcError with what it
    says against the request.
    """

    node: "environment_state_pb2_grpc.EnvStateServiceAsyncStub"
    lease: environments_pb2.Lease
    outage: Outage
    timeout_s: float

    async def snapshot(
        self, snapshot_id: str, *, with_memory: bool = False
    ) -> environment_state_pb2.SnapshotResponse:
        """Save the environment, which goes on. The same id again is the same snapshot.

        Args:
            snapshot_id: unique within the run.
            with_memory: refuse drivers that save files only.
        """
        request = environment_state_pb2.SnapshotRequest(
            lease_id=self.lease.lease_id,
            control_token=self.lease.control_token,
            snapshot_id=snapshot_id,
            with_memory=with_memory,
        )
        return await self._asked(lambda: self.node.Snapshot(request, timeout=self.timeout_s))

    async def rollback(self, snapshot_id: str) -> None:
        """Put the environment back to a snapshot of its own."""
        request = environment_state_pb2.RollbackRequest(
            lease_id=self.lease.lease_id,
            control_token=self.lease.control_token,
            snapshot_id=snapshot_id,
        )
        await self._asked(lambda: self.node.Rollback(request, timeout=self.timeout_s))

    async def pause(self) -> None:
        """Have the environment use neither memory nor CPU time; its lease is renewed on."""
        request = environment_state_pb2.PauseRequest(
            lease_id=self.lease.lease_id, control_token=self.lease.control_token
        )
        await self._asked(lambda: self.node.Pause(request, timeout=self.timeout_s))

    async def resume(self, *, ttl_s: int = 0) -> int:
        """Let the environment go on.

        Args:
            ttl_s: for a lease that expired and was kept; 0 is the node's default.

        Returns:
            The lease's end, in Unix milliseconds.
        """
        request = environment_state_pb2.ResumeRequest(
            lease_id=self.lease.lease_id,
            control_token=self.lease.control_token,
            ttl_seconds=ttl_s,
        )
        answer = await self._asked(lambda: self.node.Resume(request, timeout=self.timeout_s))
        return answer.expires_unix_ms

    async def drop(self, snapshot_ids: Sequence[str]) -> list[str]:
        """Free the space of snapshots; returns those that there are none of."""
        request = environment_state_pb2.DropSnapshotsRequest(
            lease_id=self.lease.lease_id,
            control_token=self.lease.control_token,
            snapshot_ids=snapshot_ids,
        )
        answer = await self._asked(lambda: self.node.DropSnapshots(request, timeout=self.timeout_s))
        return list(answer.missing_snapshot_ids)

    async def _asked(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        while True:
            async with self.outage.waiting(f"node {self.lease.endpoint}"):
                return await ask()


def forks(
    parent: environments_pb2.LaunchBatchRequest, snapshot_id: str, *, count: int
) -> environments_pb2.LaunchBatchRequest:
    """The order for environments that start from a snapshot of one that this order brought."""
    made = environments_pb2.LaunchBatchRequest()
    made.CopyFrom(parent)
    made.idempotency_key = f"{parent.idempotency_key}/{snapshot_id}"
    made.snapshot_id, made.count = snapshot_id, count
    return made
