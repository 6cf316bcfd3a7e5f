"""All environments of one node: opened, found, expired, taken over."""

import asyncio
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.agent.toolsets import toolset
from etude.common.errors import CorruptError, EtudeError, UnknownIdError, UserError, crossing
from etude.envserver import folders, metrics
from etude.envserver.drivers.base import Driver, SandboxError, Strength
from etude.envserver.node import records
from etude.envserver.node.cache import ResultCache
from etude.envserver.node.environment import Environment, seconds_left
from etude.envserver.node.records import LEASE_ID, Record
from etude.envserver.node.sources import Source, Sources
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

TAKE_OVER_S = 60.0
"""Shortest life of a lease that was taken over: its broker has yet to say how long it really is."""
RESERVE_BYTES = 256 << 20
"""No environment is opened when the disk has less than this left."""

ISOLATION: Mapping[Strength, environments_pb2.Isolation] = {
    Strength.WEAK: environments_pb2.ISOLATION_WEAK,
    Strength.MODERATE: environments_pb2.ISOLATION_MODERATE,
    Strength.STRONG: environments_pb2.ISOLATION_STRONG,
}


@dataclass(slots=True)
class Node:
    """Holds leases, at most one per slot."""

    driver: Driver
    sources: Sources
    slots: int
    templates: Collection[str]
    """Templates that may run behind this driver's wall."""
    endpoint: str = ""
    """host:port where clients reach this node, once it listens."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why each of the pool's other templates may not."""
    cache: ResultCache = field(default_factory=ResultCache)
    _held: dict[str, Environment] = field(default_factory=dict)
    _opening: set[str] = field(default_factory=set)

    def find(self, lease_id: str) -> Environment:
        """The environment of a lease.

        Raises:
            UnknownIdError: this node does not hold it, or no longer.
        """
        found = self._held.get(lease_id)
        if found is None:
            raise UnknownIdError(f"this node holds no lease {lease_id!r}")
        return found

    def held(self) -> list[environments_pb2.HeldLease]:
        """Every lease, for the broker."""
        leases = [environment.record.held for environment in self._held.values()]
        for held in leases:
            # A predecessor may have listened elsewhere.
            held.lease.endpoint = self.endpoint
        return leases

    async def open(
        self, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        """One outcome per lease, in order. A lease that is held already stays as it is."""
        try:
            source = await self._admit(request)
        except EtudeError as error:
            return [_failure(held.index, _reason(error), str(error)) for held in request.leases]
        return await asyncio.gather(*(self._open(held, request, source) for held in request.leases))

    async def close(self, lease_ids: Iterable[str]) -> None:
        """End leases; those that are not held have ended already."""
        ending = [self._held.pop(lease_id, None) for lease_id in lease_ids]
        await asyncio.gather(*(environment.close() for environment in ending if environment))
        self._count()

    async def expire(self, *, now_s: float) -> list[str]:
        """End the leases whose time is over, by the monotonic clock."""
        over = [lease_id for lease_id, env in self._held.items() if env.deadline_s <= now_s]
        await self.close(over)
        return over

    def renew(self, expiries: Iterable[environments_pb2.LeaseExpiry]) -> None:
        """Take the broker's word for how long leases last."""
        for expiry in expiries:
            environment = self._held.get(expiry.lease_id)
            if environment is not None:
                lease = environment.record.held.lease
                lease.expires_unix_ms = expiry.expires_unix_ms
                environment.deadline_s = time.monotonic() + seconds_left(lease)

    async def take_over(self) -> tuple[int, int]:
        """Continue the leases that a predecessor left on the disk and remove everything else.

        Returns:
            Leases taken over, and folders removed.
        """
        self.driver.leases.mkdir(parents=True, exist_ok=True)
        removed = 0
        for folder in sorted(self.driver.leases.iterdir()):
            try:
                await self._take_over(folder)
            except EtudeError as error:
                log.warning("lease %s is not taken over: %s", folder.name, error)
                removed += await asyncio.to_thread(_remove_or_say, folder)
        self._count()
        return len(self._held), removed

    async def _take_over(self, folder: Path) -> None:
        record = records.load(folder)
        source = await self.sources.get(record.uri)
        if source.key != record.source_key:
            raise CorruptError(f"{record.uri} is no longer what the lease started from")
        environment = self._environment(record, source, TAKE_OVER_S)
        if not await environment.take_over(records.history(folder / records.CALLS)):
            raise SandboxError("a turn was cut off after it had changed the workspace")
        self._held[record.lease_id] = environment

    async def _admit(self, request: environments_pb2.OpenEnvironmentsRequest) -> Source:
        if request.template in self.refused:
            raise WeakWallError(self.refused[request.template])
        if request.template not in self.templates:
            raise UnknownIdError(f"this pool has no template {request.template!r}")
        toolset(request.toolset)
        free = _free_bytes(self.driver.leases)
        metrics.free_bytes.set(free)
        if free < RESERVE_BYTES:
            raise SandboxError(
                f"{self.driver.leases} has {free >> 20} MiB left, less than {RESERVE_BYTES >> 20}:"
                " free some space or give the node a larger scratch volume"
            )
        return await self.sources.get(request.workspace.uri)

    async def _open(
        self,
        held: environments_pb2.HeldLease,
        request: environments_pb2.OpenEnvironmentsRequest,
        source: Source,
    ) -> environments_pb2.LaunchBatchResponse:
        started_s = time.monotonic()
        lease = held.lease
        if lease.lease_id in self._held:
            return _success(self._held[lease.lease_id].record.held)
        if len(self._held) + len(self._opening) >= self.slots:
            return _failure(held.index, "NoSlot", f"all {self.slots} slots are taken")
        if not LEASE_ID.match(lease.lease_id) or lease.lease_id in self._opening:
            return _failure(held.index, "InvalidArgument", f"no usable lease {lease.lease_id!r}")
        self._opening.add(lease.lease_id)
        try:
            record = self._record(held, request, source)
            with crossing(SandboxError, f"opening {lease.lease_id}"):
                await asyncio.to_thread(self._save, record, started_s)
            self._held[lease.lease_id] = self._environment(record, source, seconds_left(lease))
        except EtudeError as error:
            return _failure(held.index, error.reason, str(error))
        finally:
            self._opening.discard(lease.lease_id)
        self._count()
        metrics.starts.labels("copy").inc()
        metrics.start_seconds.labels("copy").observe(time.monotonic() - started_s)
        return _success(record.held)

    def _record(
        self,
        held: environments_pb2.HeldLease,
        request: environments_pb2.OpenEnvironmentsRequest,
        source: Source,
    ) -> Record:
        kept = environments_pb2.HeldLease()
        kept.CopyFrom(held)
        kept.lease.endpoint = self.endpoint
        kept.lease.driver = self.driver.name
        kept.lease.isolation = ISOLATION[self.driver.strength]
        return Record(
            held=kept,
            template=request.template,
            uri=request.workspace.uri,
            toolset=request.toolset,
            source_key=source.key,
        )

    def _save(self, record: Record, started_s: float) -> None:
        folder = self.driver.leases / record.lease_id
        folder.mkdir(mode=0o755)
        record.held.lease.start_ms = round(1000 * (time.monotonic() - started_s))
        records.save(folder, record)

    def _environment(self, record: Record, source: Source, least_s: float) -> Environment:
        return Environment(
            record=record,
            source=source,
            toolset=toolset(record.toolset),
            folder=self.driver.leases / record.lease_id,
            driver=self.driver,
            cache=self.cache,
            deadline_s=time.monotonic() + max(least_s, seconds_left(record.held.lease)),
        )

    def _count(self) -> None:
        metrics.environments.labels("leased").set(len(self._held))


class WeakWallError(EtudeError):
    """The template is not trusted enough for this driver."""

    reason = "WeakIsolation"


def _remove_or_say(folder: Path) -> bool:
    try:
        folders.remove(folder)
    except OSError:
        log.exception("%s stays on the disk", folder)
        return False
    return True


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _reason(error: EtudeError) -> str:
    return error.problem.reason if isinstance(error, UserError) else error.reason


def _success(held: environments_pb2.HeldLease) -> environments_pb2.LaunchBatchResponse:
    return environments_pb2.LaunchBatchResponse(index=held.index, lease=held.lease)


def _failure(index: int, reason: str, message: str) -> environments_pb2.LaunchBatchResponse:
    failure = environments_pb2.LaunchFailure(reason=reason, message=message)
    return environments_pb2.LaunchBatchResponse(index=index, failure=failure)
