"""A sandbox host: opens, finds, expires and adopts the environments of its leases."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.agent.toolsets import toolset
from etude.common.errors import (
    CorruptError,
    EtudeError,
    FullError,
    UnknownIdError,
    UserError,
    WrongStateError,
    crossing,
)
from etude.common.pinned_images import pool_template
from etude.envserver import metrics
from etude.envserver.drivers.base import Driver, SandboxError, StartKind
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.launch_source import LaunchSource, LaunchSources
from etude.envserver.host.leases import expired_leases, lease_fields, records
from etude.envserver.host.leases.expired_leases import ExpiredLeases
from etude.envserver.host.leases.records import LEASE_ID, LeaseRecord
from etude.envserver.host.leases.start_tracker import StartTracker
from etude.envserver.host.preemptions import HostPreemptions
from etude.envserver.host.result_cache import ResultCache
from etude.envserver.host.snapshots.environment_state import EnvironmentStates
from etude.envserver.host.snapshots.local_snapshots import LocalSnapshots
from etude.envserver.host.snapshots.snapshot_record import NO_TERMS, LocalSnapshot
from etude.envserver.host.task_images import TaskImages, require_images
from etude.envserver.host.workspace_sources import WorkspaceSource, WorkspaceSources
from etude.envserver.storage import folders
from etude.envserver.storage.folders import FolderLimits
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

TAKE_OVER_S = 60.0
"""Shortest life of an adopted lease, until its broker reports the real end."""
RETRY_AFTER_S = 2.0


@dataclass(slots=True)
class Host:
    """Holds leases, at most one per slot and those that are preempted."""

    driver: Driver
    sources: WorkspaceSources
    slots: int
    templates: Collection[str]
    """Templates whose trust allows this driver's isolation."""
    endpoint: str = ""
    """host:port where clients reach this host, once it listens."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The pool's other templates, with the reason why each may not run here."""
    images: TaskImages | None = None
    """Images that tasks name by digest; None where the pool takes none."""
    change_limits: FolderLimits = folders.DIFF
    """Limits on what the calls of a lease may change."""
    cache: ResultCache = field(default_factory=ResultCache)
    start_tracker: StartTracker = field(default_factory=StartTracker)
    states: EnvironmentStates = field(init=False)
    expired_leases: ExpiredLeases = field(init=False)
    preemptions: HostPreemptions = field(init=False)
    _held: dict[str, LeasedEnvironment] = field(default_factory=dict)
    _endings: set[asyncio.Task[None]] = field(default_factory=set)
    _opening: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.states = EnvironmentStates(
            self.driver, LocalSnapshots(self.driver.leases.parent / "snapshots")
        )
        self.expired_leases = ExpiredLeases(self.states)
        self.preemptions = HostPreemptions(self.states, self._held, lambda: not self._is_full())
        if self.images is not None:
            self.images.in_use = self._templates_in_use

    def find(self, lease_id: str) -> LeasedEnvironment:
        """The environment of a lease.

        Raises:
            UnknownIdError: this host does not hold it, or no longer.
            WrongStateError: it has expired and is kept.
        """
        if lease_id in self.expired_leases:
            raise WrongStateError(f"lease {lease_id!r} has expired and is kept: resume it first")
        found = self._held.get(lease_id)
        if found is None:
            raise UnknownIdError(f"this host holds no lease {lease_id!r}")
        return found

    def _templates_in_use(self) -> set[str]:
        """Driver's names of the templates that leases and snapshots use."""
        environments = (*self._held.values(), *self.expired_leases.environments())
        names = {each.record.template for each in environments}
        return names | {each.template for each in self.states.snapshots.held_snapshots()}

    @property
    def is_empty(self) -> bool:
        """True if it holds no environment, not even an expired one, and makes none."""
        return not (self._held or self._opening or self._endings or len(self.expired_leases))

    def held_leases(self) -> list[environments_pb2.HeldLease]:
        """Every lease, for the broker."""
        leases = [environment.record.held for environment in self._held.values()]
        for held in leases:
            # A predecessor may have listened elsewhere.
            held.lease.endpoint = self.endpoint
        return leases

    async def open(
        self, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        """Open environments; one outcome per lease, in order. A held lease stays as it is."""
        try:
            found = await self._launch_source.resolve(request)
        except EtudeError as error:
            return [_failure(held.index, _reason_of(error), str(error)) for held in request.leases]
        images = self.images
        with contextlib.nullcontext() if images is None else images.opening(found.template):
            opening = (self._open(held, request, found) for held in request.leases)
            return await asyncio.gather(*opening)

    async def close(self, lease_ids: Iterable[str]) -> None:
        """End leases; those that are not held have ended already."""
        ending = []
        for lease_id in lease_ids:
            if self.expired_leases.was_just_resumed(lease_id):
                continue
            environment = self._held.pop(lease_id, None)
            if environment is None:
                continue
            self.start_tracker.untrack(environment)
            if expired_leases.pauses_on_expiry(environment) and expired_leases.has_expired(
                environment
            ):
                self.expired_leases.keep(environment)
            else:
                ending.append(environment)
        self._count()
        tasks = [asyncio.create_task(each.close(), name=f"end {each.lease_id}") for each in ending]
        for task in tasks:
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)
        # The caller may give up meanwhile: the environments end all the same.
        await asyncio.shield(asyncio.gather(*tasks))

    async def expire(self, *, now_s: float) -> list[str]:
        """End the leases whose time is over, by the monotonic clock, and snapshots that are old.

        A lease whose sandbox has ended is over, too, and frees its slot.
        """
        for lease_id in [lease_id for lease_id, env in self._held.items() if env.is_lost]:
            log.warning("lease %s is lost with its sandbox", lease_id)
            metrics.errors.labels("lost").inc()
            await self.close([lease_id])
        over = [lease_id for lease_id, env in self._held.items() if env.deadline_s <= now_s]
        for lease_id in over:
            if expired_leases.pauses_on_expiry(self._held[lease_id]):
                self.start_tracker.untrack(self._held[lease_id])
                self.expired_leases.keep(self._held.pop(lease_id))
        await asyncio.gather(self.close(over), self.expired_leases.expire(now_s=now_s))
        runs = self.expired_leases.runs() | {env.record.held.run_id for env in self._held.values()}
        now_unix_ms = round(1000 * time.time())
        await self.states.snapshots.remove_expired(runs, now_s=now_s, now_unix_ms=now_unix_ms)
        return over

    def renew(self, expiries: Iterable[environments_pb2.LeaseExpiry]) -> None:
        """Set the ends of leases as the broker reports them."""
        for expiry in expiries:
            environment = self._held.get(expiry.lease_id)
            if environment is not None:
                lease = environment.record.held.lease
                lease.expires_unix_ms = expiry.expires_unix_ms
                environment.deadline_s = time.monotonic() + lease_fields.seconds_left(lease)

    async def resume(self, lease_id: str, control_token: str, *, ttl_s: int) -> int:
        """Let a paused environment go on; a lease that expired is one again, for the given time.

        Returns:
            The lease's end, in Unix milliseconds.

        Raises:
            UnknownIdError: this host does not hold it, or no longer.
            FullError: all slots are taken.
            EtudeError: the driver failed.
        """
        environment = self.expired_leases.get(lease_id) or self.find(lease_id)
        environment.check_control(control_token)
        if lease_id in self.expired_leases:
            if self._is_full():
                raise FullError(f"all {self.slots} slots are taken", retry_after_s=RETRY_AFTER_S)
            self._held[lease_id] = self.expired_leases.resume(lease_id)
            expires_unix_ms = round(1000 * (time.time() + ttl_s))
            self.renew(
                [environments_pb2.LeaseExpiry(lease_id=lease_id, expires_unix_ms=expires_unix_ms)]
            )
            self._count()
        await self.states.resume(environment)
        return environment.record.held.lease.expires_unix_ms

    async def take_over(self) -> tuple[int, int]:
        """Adopt the leases that a predecessor left on the disk and remove everything else.

        Returns:
            Leases adopted, and folders removed.
        """
        self.driver.leases.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self.states.snapshots.take_over)
        removed = 0
        for folder in sorted(self.driver.leases.iterdir()):
            try:
                await self._take_over(folder)
            except EtudeError as error:
                log.warning("lease %s is not adopted: %s", folder.name, error)
                removed += await asyncio.to_thread(_remove_or_log, folder)
        self._count()
        return len(self._held), removed

    async def _take_over(self, folder: Path) -> None:
        record = records.load_record(folder)
        task = None
        if record.image:
            images = require_images(self.images)
            task = await images.get(pool_template(record.template), record.image)
        source = await self.sources.get(record.uri, task)
        if source.key != record.source_key:
            raise CorruptError(f"{record.uri} is no longer what the lease started from")
        environment = self._environment(record, source, TAKE_OVER_S)
        was_put_back = await self.states.continue_rollback(environment)
        until_unix_ms = await self.states.continue_pause(environment)
        if not was_put_back:
            await self._continue(environment, folder)
        if until_unix_ms:
            self.expired_leases.add(environment, for_s=until_unix_ms / 1000 - time.time())
        else:
            self._held[record.lease_id] = environment
            self.start_tracker.track(environment)

    async def _continue(self, environment: LeasedEnvironment, folder: Path) -> None:
        """Adopt the results of a lease's calls.

        Raises:
            SandboxError: a turn was cut off, and its effect is unknown.
        """
        if not await environment.take_over(records.read_calls(folder / records.CALLS)):
            raise SandboxError("a turn was cut off after it had changed the workspace")

    async def _open(
        self,
        held: environments_pb2.HeldLease,
        request: environments_pb2.OpenEnvironmentsRequest,
        found: LaunchSource,
    ) -> environments_pb2.LaunchBatchResponse:
        started_s = time.monotonic()
        lease = held.lease
        if lease.lease_id in self._held:
            return _success(self._held[lease.lease_id].record.held)
        if self._is_full():
            return _failure(held.index, "NoSlot", f"all {self.slots} slots are taken")
        if not LEASE_ID.match(lease.lease_id) or lease.lease_id in self._opening:
            return _failure(
                held.index,
                "InvalidArgument",
                f"lease {lease.lease_id!r} is not a valid id, or is being opened",
            )
        self._opening.add(lease.lease_id)
        try:
            record = self._record(held, request, found)
            environment = self._environment(record, found.source, lease_fields.seconds_left(lease))
            await self._make(environment, found.snapshot, started_s)
            self._held[lease.lease_id] = environment
            self.start_tracker.track(environment)
        except EtudeError as error:
            return _failure(held.index, error.reason, str(error))
        finally:
            self._opening.discard(lease.lease_id)
        self._count()
        if self.driver.start_kind is not None:
            start = str(self._start_kind(request))
            metrics.starts.labels(start).inc()
            metrics.start_seconds.labels(start).observe(time.monotonic() - started_s)
        return _success(record.held)

    def _record(
        self,
        held: environments_pb2.HeldLease,
        request: environments_pb2.OpenEnvironmentsRequest,
        found: LaunchSource,
    ) -> LeaseRecord:
        granted = environments_pb2.HeldLease()
        granted.CopyFrom(held)
        granted.lease.endpoint = self.endpoint
        lease_fields.fill_lease(granted.lease, self.driver, self._start_kind(request))
        terms = NO_TERMS if found.snapshot is None else found.snapshot.terms
        return LeaseRecord(
            held=granted,
            template=found.template,
            uri=request.workspace.uri,
            toolset=request.toolset,
            source_key=found.source.key,
            on_expiry=request.on_expiry,
            snapshot_id=request.snapshot_id,
            image=request.image,
            is_prepared=terms.is_prepared,
            setup_files=terms.setup_files,
        )

    async def _make(
        self, environment: LeasedEnvironment, snapshot: LocalSnapshot | None, started_s: float
    ) -> None:
        """Make the lease's folder, with the content of its snapshot; all or nothing."""
        record, folder = environment.record, environment.folder
        with crossing(SandboxError, f"opening {record.lease_id}"):
            folder.mkdir(mode=0o755)
            async with contextlib.AsyncExitStack() as failed:
                failed.push_async_callback(environment.close)
                if snapshot is not None:
                    await self.states.start_from(environment, snapshot)
                record.held.lease.start_ms = round(1000 * (time.monotonic() - started_s))
                await asyncio.to_thread(records.save_record, folder, record)
                failed.pop_all()

    def _environment(
        self, record: LeaseRecord, source: WorkspaceSource, least_s: float
    ) -> LeasedEnvironment:
        return LeasedEnvironment(
            record=record,
            source=source,
            toolset=toolset(record.toolset),
            folder=self.driver.leases / record.lease_id,
            driver=self.driver,
            cache=self.cache,
            change_limits=self.change_limits,
            deadline_s=time.monotonic()
            + max(least_s, lease_fields.seconds_left(record.held.lease)),
        )

    @property
    def _launch_source(self) -> LaunchSources:
        return LaunchSources(
            driver=self.driver,
            sources=self.sources,
            states=self.states,
            images=self.images,
            templates=self.templates,
            refused=self.refused,
        )

    def _is_full(self) -> bool:
        return len(self._held) - self.preemptions.num_paused + len(self._opening) >= self.slots

    def _start_kind(self, request: environments_pb2.OpenEnvironmentsRequest) -> StartKind | None:
        return StartKind.DELTA if request.snapshot_id else self.driver.start_kind

    def _count(self) -> None:
        metrics.environments.labels("leased").set(len(self._held))
        metrics.environments.labels("kept").set(len(self.expired_leases))


def _remove_or_log(folder: Path) -> bool:
    try:
        folders.remove_folder(folder)
    except OSError:
        log.exception("%s stays on the disk", folder)
        return False
    return True


def _reason_of(error: EtudeError) -> str:
    return error.problem.reason if isinstance(error, UserError) else error.reason


def _success(held: environments_pb2.HeldLease) -> environments_pb2.LaunchBatchResponse:
    return environments_pb2.LaunchBatchResponse(index=held.index, lease=held.lease)


def _failure(index: int, reason: str, message: str) -> environments_pb2.LaunchBatchResponse:
    failure = environments_pb2.LaunchFailure(reason=reason, message=message)
    return environments_pb2.LaunchBatchResponse(index=index, failure=failure)
