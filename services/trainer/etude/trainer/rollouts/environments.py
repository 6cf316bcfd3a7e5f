"""Environments of a group: launch requests, and clients of leased environments."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from typing_extensions import override

from etude.common.rpc.retry_after import retry_after_s
from etude.trainer.rollouts.client_pool import ClientPool
from etude.trainer.rollouts.failover import ReplacementSource
from etude.trainer.rollouts.leases import Leases
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.protocol import GroupRequest, WorkerConfig
from etude.trainer.rollouts.sandbox_client import SandboxClient
from etude.trainer.rollouts.snapshot_client import SnapshotClient
from etude.trainer.rollouts.task_setup import TaskSetup
from etude.trainer.routing.table import Purpose
from etude.v1 import environment_state_pb2, environments_pb2

log = logging.getLogger(__name__)

CALL_MARGIN_S = 30.0
"""On top of a rollout's own limit: the rollout ends first, so that slowness is not a fault."""

MIN_QUEUE_S = 600

RESUME_LIMIT_S = 60.0
"""Longest time for a host to resume an environment: one that hangs holds up its siblings' slots."""
RESUMED_S = 120
"""Life of a lease that had expired, before it is renewed."""
ADOPTION_TRIES = 10
ADOPTION_PAUSE_S = 0.5


@dataclass(slots=True, kw_only=True)
class GroupEnvironments:
    """Environments of one group request at the broker of its pool."""

    order: GroupRequest
    config: WorkerConfig
    clients: ClientPool
    nonce: str
    """Part of every idempotency key: no attempt gets an environment that another attempt, or an
    earlier worker, has used."""
    image: str = ""
    """Image that environments must boot; empty for any."""
    is_dropped: bool = False
    """True once the group was cancelled for good: its rollouts have no successor."""

    @property
    def call_s(self) -> float:
        """Timeout of one call to an engine or a sandbox host."""
        return self.order.limits.timeout_seconds + CALL_MARGIN_S

    @property
    def _queue_s(self) -> int:
        """Longest wait for an environment."""
        return max(MIN_QUEUE_S, 4 * self.order.limits.timeout_seconds)

    @property
    def leases(self) -> Leases:
        """This worker's leases at the broker."""
        return self.clients.leases(self.order.environment)

    def states(self, lease: environments_pb2.Lease, outage: OutageBudget) -> SnapshotClient:
        """Client for the state of a leased environment."""
        return SnapshotClient(
            self.clients.snapshot_stub(lease.endpoint), lease, outage, self.call_s
        )

    def leave(self, lease_id: str) -> None:
        """End the use of a lease by a rollout that was cancelled before its end.

        A successor goes on in the environment of a training rollout, unless the group was dropped:
        the lease expires at its time, and is resumed then. Other leases are released.
        """
        if self.is_dropped or self.order.purpose is not Purpose.TRAINING:
            self.leases.release([lease_id])
        else:
            self.leases.leave([lease_id])

    async def take_over(self, lease: environments_pb2.Lease) -> bool:
        """Hold the lease of an earlier attempt, or of a worker that died; False if it is gone.

        Hosts keep the environment of an expired lease for a while, until it is resumed. A host
        without a free slot is waited for as long as a new environment would be.
        """
        if await self.leases.take_over(lease.lease_id):
            return True
        try:
            await self._resume(lease)
        except grpc.aio.AioRpcError as error:
            log.info("lease %s is gone: %s", lease.lease_id, error.details())
            return False
        for _ in range(ADOPTION_TRIES):
            # Its host's next heartbeat makes it known to the broker again.
            if await self.leases.take_over(lease.lease_id):
                return True
            await asyncio.sleep(ADOPTION_PAUSE_S)
        return False

    async def _resume(self, lease: environments_pb2.Lease) -> None:
        """Resume the environment of an expired lease at its host.

        Raises:
            AioRpcError: the host does not have it, stayed full, or does not answer.
        """
        stub = self.clients.snapshot_stub(lease.endpoint)
        request = environment_state_pb2.ResumeRequest(
            lease_id=lease.lease_id, control_token=lease.control_token, ttl_seconds=RESUMED_S
        )
        waited_s = 0.0
        while True:
            try:
                await stub.Resume(request, timeout=RESUME_LIMIT_S)
            except grpc.aio.AioRpcError as error:
                later_s = retry_after_s(error)
                if later_s is None or waited_s >= self._queue_s:
                    raise
                log.info("%s: retrying in %.1f s", error.details(), later_s)
                await asyncio.sleep(later_s)
                waited_s += later_s
            else:
                return

    async def announce(self) -> None:
        """Tell the broker that the group starts soon, if it has siblings."""
        order = self.order
        if len(order.indices) > 1:
            request = environments_pb2.PrepareGroupRequest(
                run_id=self.config.run,
                group_id=order.group_id,
                template=self.config.templates[order.environment],
                workspace=environments_pb2.WorkspaceSource(uri=f"{order.task_uri}/environment"),
                count=len(order.indices),
                image=self.image,
            )
            await self.leases.announce(request)

    def launch_request(
        self, indices: Sequence[int], attempt: int | str
    ) -> environments_pb2.LaunchBatchRequest:
        """Build the launch request for some siblings; each attempt has its own idempotency key."""
        order, config = self.order, self.config
        return environments_pb2.LaunchBatchRequest(
            run_id=config.run,
            idempotency_key=f"{self.nonce}/{order.rollout_id(indices[0])}/{attempt}",
            template=config.templates[order.environment],
            workspace=environments_pb2.WorkspaceSource(uri=f"{order.task_uri}/environment"),
            count=len(indices),
            toolset=order.limits.toolset,
            image=self.image,
            on_expiry=environments_pb2.ON_EXPIRY_PAUSE,
            # A single rollout has no siblings to share a host with.
            group_id=order.group_id if len(order.indices) > 1 else "",
            queue_timeout_seconds=self._queue_s,
            lease_class=(
                environments_pb2.LEASE_CLASS_TRAINING
                if order.purpose is Purpose.TRAINING
                else environments_pb2.LEASE_CLASS_EVALUATION
            ),
        )


@dataclass(slots=True)
class RolloutEnvironments(ReplacementSource):
    """Environments for one attempt at one sibling."""

    group: GroupEnvironments
    index: int
    attempt: int
    outage: OutageBudget
    setup: TaskSetup

    @override
    def request(self, number: int) -> environments_pb2.LaunchBatchRequest:
        request = self.group.launch_request([self.index], f"{self.attempt}/{number}")
        # The siblings already run on other hosts.
        request.group_id = ""
        return request

    @override
    def environment(self, lease: environments_pb2.Lease) -> SandboxClient:
        stub = self.group.clients.sandbox_stub(lease.endpoint)
        leases, call_s = self.group.leases, self.group.call_s
        return SandboxClient(stub, lease, leases, self.outage, timeout_s=call_s)

    @override
    def states(self, lease: environments_pb2.Lease) -> SnapshotClient:
        return self.group.states(lease, self.outage)

    @override
    async def set_up(self, lease: environments_pb2.Lease) -> None:
        await self.setup.run(self.states(lease))
