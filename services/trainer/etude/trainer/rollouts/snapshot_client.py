"""Snapshot client of a leased environment: snapshot, roll back, pause, resume, fork."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from etude.trainer.rollouts.outage import OutageBudget
from etude.v1 import environment_state_pb2, environment_state_pb2_grpc, environments_pb2

_T = TypeVar("_T")


@dataclass(slots=True)
class SnapshotClient:
    """Calls to the host of a lease, each retried while the host is unreachable.

    Every method raises UnavailableError when the host stayed away, and AioRpcError when it refuses
    the request.
    """

    node: "environment_state_pb2_grpc.EnvStateServiceAsyncStub"
    lease: environments_pb2.Lease
    outage: OutageBudget
    timeout_s: float

    async def set_up(
        self, commands: Sequence[str], *, limit_s: int
    ) -> environment_state_pb2.SetUpResponse:
        """Run a task's set-up commands in an environment that was not used.

        It is not retried: a set-up that was cut off leaves its environment half set up.

        Args:
            commands: shell commands; the first that fails ends the set-up.
            limit_s: time limit of all of them together.
        """
        request = environment_state_pb2.SetUpRequest(
            lease_id=self.lease.lease_id,
            control_token=self.lease.control_token,
            commands=commands,
            timeout_seconds=limit_s,
        )
        return await self.node.SetUp(request, timeout=limit_s + self.timeout_s)

    async def snapshot(
        self, snapshot_id: str, *, with_memory: bool = False, ttl_s: int = 0
    ) -> environment_state_pb2.SnapshotResponse:
        """Snapshot the environment, which goes on running. The same id gives the same snapshot.

        Args:
            snapshot_id: unique within the run.
            with_memory: refuse drivers that save files only.
            ttl_s: the host removes it after this; 0: after a day.
        """
        request = environment_state_pb2.SnapshotRequest(
            lease_id=self.lease.lease_id,
            control_token=self.lease.control_token,
            snapshot_id=snapshot_id,
            with_memory=with_memory,
            ttl_seconds=ttl_s,
        )
        return await self._call(lambda: self.node.Snapshot(request, timeout=self.timeout_s))

    async def rollback(self, snapshot_id: str) -> None:
        """Roll the environment back to one of its own snapshots."""
        request = environment_state_pb2.RollbackRequest(
            lease_id=self.lease.lease_id,
            control_token=self.lease.control_token,
            snapshot_id=snapshot_id,
        )
        await self._call(lambda: self.node.Rollback(request, timeout=self.timeout_s))

    async def pause(self) -> None:
        """Pause the environment: it uses neither memory nor CPU time, and keeps its lease."""
        request = environment_state_pb2.PauseRequest(
            lease_id=self.lease.lease_id, control_token=self.lease.control_token
        )
        await self._call(lambda: self.node.Pause(request, timeout=self.timeout_s))

    async def resume(self, *, ttl_s: int = 0) -> int:
        """Resume a paused environment.

        Args:
            ttl_s: new lease time of a retained expired lease; 0 is the host's default.

        Returns:
            End of the lease, in Unix milliseconds.
        """
        request = environment_state_pb2.ResumeRequest(
            lease_id=self.lease.lease_id,
            control_token=self.lease.control_token,
            ttl_seconds=ttl_s,
        )
        answer = await self._call(lambda: self.node.Resume(request, timeout=self.timeout_s))
        return answer.expires_unix_ms

    async def drop(self, snapshot_ids: Sequence[str]) -> list[str]:
        """Delete snapshots, also of a lease that has ended; return the ids that do not exist."""
        request = environment_state_pb2.DropSnapshotsRequest(
            lease_id=self.lease.lease_id,
            control_token=self.lease.control_token,
            snapshot_ids=snapshot_ids,
        )
        answer = await self._call(lambda: self.node.DropSnapshots(request, timeout=self.timeout_s))
        return list(answer.missing_snapshot_ids)

    async def _call(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        while True:
            async with self.outage.count_outage(f"node {self.lease.endpoint}"):
                return await ask()


def fork_request(
    parent: environments_pb2.LaunchBatchRequest, snapshot_id: str, *, count: int
) -> environments_pb2.LaunchBatchRequest:
    """Build the request for environments that fork from a snapshot of the parent request's."""
    request = environments_pb2.LaunchBatchRequest()
    request.CopyFrom(parent)
    request.idempotency_key = f"{parent.idempotency_key}/{snapshot_id}"
    request.snapshot_id, request.count = snapshot_id, count
    return request
