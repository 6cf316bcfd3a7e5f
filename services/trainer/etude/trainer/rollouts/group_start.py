"""Start of a group's rollouts: a task is set up once, and siblings are forks of the snapshot."""

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc

from etude.common.errors import EtudeError, UnavailableError
from etude.trainer.rollouts.environments import GroupEnvironments
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.protocol import StartCounts
from etude.trainer.rollouts.sandbox_client import EnvironmentLostError
from etude.trainer.rollouts.snapshot_client import SnapshotClient
from etude.trainer.rollouts.task_setup import SetupFailedError, TaskSetup
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

MAX_SETUPS = 4
"""Set-ups of one group: the first, and others for hosts that were lost or are too small."""
DROP_S = 10.0
"""Longest wait for a host that drops a snapshot."""
SNAPSHOT_MARGIN_S = 3_600
"""Life of a group's snapshot beyond its rollouts: the queue, retries and grading."""

_T = TypeVar("_T")


def shares_setup(setup: TaskSetup, caps: environments_pb2.Caps, *, siblings: int) -> bool:
    """Decide whether siblings fork from one environment that was set up for all of them.

    Without set-up commands each sibling starts from its template and first files, which hosts keep
    ready; without snapshots of files there is nothing to fork.
    """
    return bool(setup.commands) and siblings > 1 and caps.files


@dataclass(frozen=True, slots=True, eq=False)
class GroupSnapshot:
    """Snapshot of the environment of a group that was set up, on one host."""

    snapshot_id: str
    client: SnapshotClient
    """Of the lease that was set up, which has ended."""


@dataclass(slots=True, kw_only=True)
class GroupStart:
    """Snapshots that a group's rollouts start from, taken ahead of them."""

    environments: GroupEnvironments
    setup: TaskSetup
    outage_s: float
    counts: StartCounts = field(default_factory=StartCounts)
    _taken: list[GroupSnapshot] = field(default_factory=list)
    _preparing: asyncio.Task[GroupSnapshot | None] | None = None
    _numbers: int = 0
    """Set-ups so far."""

    def begin(self) -> None:
        """Prepare in the background, before the group's rollouts may start."""
        self._preparing = asyncio.create_task(
            self._prepare(len(self.environments.order.indices)),
            name=f"prepare {self.environments.order.group_id}",
        )

    async def snapshot(self) -> GroupSnapshot | None:
        """The snapshot to fork from; None if each sibling is set up separately.

        Raises:
            SetupFailedError: a command of the task's set-up fails.
        """
        return None if self._preparing is None else await asyncio.shield(self._preparing)

    async def next_snapshot(self, former: GroupSnapshot, *, siblings: int) -> GroupSnapshot | None:
        """A snapshot for siblings that the former one has not served: its host is lost or full.

        Raises:
            SetupFailedError: a command of the task's set-up fails.
        """
        if await self.snapshot() is former:
            self._preparing = asyncio.create_task(
                self._prepare(siblings), name=f"prepare {self.environments.order.group_id} again"
            )
        return await self.snapshot()

    async def close(self) -> None:
        """Drop the snapshots; what cannot be dropped now expires."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        taken, self._taken = self._taken, []
        for snapshot in taken:
            client = replace(snapshot.client, outage=OutageBudget(0))
            try:
                async with asyncio.timeout(DROP_S):
                    await client.drop([snapshot.snapshot_id])
            except (grpc.aio.AioRpcError, EtudeError, TimeoutError) as error:
                log.info("snapshot %s is left to expire: %s", snapshot.snapshot_id, error)

    async def _prepare(self, siblings: int) -> GroupSnapshot | None:
        await self.environments.announce()
        if not self.setup.commands or siblings < 2:
            return None
        while self._numbers < MAX_SETUPS:
            self._numbers += 1
            try:
                made = await self._take(siblings)
            except SetupFailedError:
                self.counts.setups_failed += 1
                raise
            except (grpc.aio.AioRpcError, UnavailableError, EnvironmentLostError) as error:
                self.counts.setups_lost += 1
                log.warning("set-up of %s: %s", self.environments.order.group_id, error)
                continue
            if made is not None:
                self.counts.setups += 1
                self._taken.append(made)
            return made
        return None

    async def _take(self, siblings: int) -> GroupSnapshot | None:
        """Set up one environment and save it.

        Raises:
            SetupFailedError: a command failed.
            UnavailableError: no environment was available, or its host stayed away.
            EnvironmentLostError: the environment is gone.
            AioRpcError: its host refuses.
        """
        leases, order = self.environments.leases, self.environments.order
        request = self.environments.launch_request(order.indices[:1], f"setup-{self._numbers}")
        lease, failure = None, "the broker gave no answer"
        async for launch in leases.launch(request):
            lease, failure = launch.lease, launch.failure
        if lease is None:
            raise UnavailableError(f"no environment: {failure}")
        try:
            if not shares_setup(self.setup, lease.caps, siblings=siblings):
                return None
            client = self.environments.states(lease, OutageBudget(self.outage_s))
            return await self._until_lost(lease, self._save(client))
        finally:
            leases.release([lease.lease_id])

    async def _save(self, client: SnapshotClient) -> GroupSnapshot:
        await self.setup.run(client)
        limits = self.environments.order.limits
        ttl_s = SNAPSHOT_MARGIN_S + (1 + limits.retries) * limits.timeout_seconds
        made = await client.snapshot(f"group-{uuid.uuid4().hex}", ttl_s=ttl_s)
        return GroupSnapshot(made.snapshot_id, client)

    async def _until_lost(
        self, lease: environments_pb2.Lease, work: Coroutine[None, None, _T]
    ) -> _T:
        """Await work in a lease, or the loss of the lease.

        Raises:
            EnvironmentLostError: the lease is gone.
        """
        task = asyncio.create_task(work, name=f"set up {lease.lease_id}")
        gone = asyncio.create_task(
            self.environments.leases.wait_until_gone(lease.lease_id), name="lease gone"
        )
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EnvironmentLostError(f"lease {lease.lease_id}: its host is lost")
            return task.result()
        finally:
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
