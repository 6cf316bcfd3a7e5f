"""State of environments as a whole: snapshot, rollback, pause and resume.

Each operation runs between two turns and goes on when its caller leaves. An operation that a dying
process leaves unfinished is finished or undone by the next: a rollback records its intent first and
is repeated from the beginning; a pause holds as soon as it is recorded.
"""

import asyncio
import contextlib
import math
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from etude.common.errors import CorruptError, EtudeError, UnknownIdError, crossing
from etude.envserver import metrics
from etude.envserver.drivers.base import (
    CapMissingError,
    Driver,
    HalfRestoredError,
    SandboxError,
    SavedSandbox,
)
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.leases import records
from etude.envserver.host.leases.preemption import refuse_preempted
from etude.envserver.host.leases.records import CALLS, PAUSED, ROLLBACK
from etude.envserver.host.snapshots.local_snapshots import LocalSnapshots
from etude.envserver.host.snapshots.snapshot_record import (
    SAVED,
    LocalSnapshot,
    SnapshotOrigin,
    SnapshotTerms,
    token_digest,
)
from etude.envserver.storage.folders import FolderLimits

_T = TypeVar("_T")


@dataclass(slots=True)
class EnvironmentStates:
    """Operations on the state of one host's environments."""

    driver: Driver
    snapshots: LocalSnapshots
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def snapshot(
        self,
        environment: LeasedEnvironment,
        snapshot_id: str,
        *,
        with_memory: bool,
        ttl_s: float = math.inf,
    ) -> LocalSnapshot:
        """Save an environment, or return the snapshot of the same id.

        Raises:
            CapMissingError: the driver saves no files, or no memory although that is required.
            EtudeError: of LocalSnapshots.take(), or the environment has ended or is paused.
        """
        self.require_files("it saves nothing")
        if with_memory and not self.driver.caps.memory:
            raise CapMissingError(self.driver.name, "memory", "its snapshots hold files only")

        async def write(folder: Path, limits: FolderLimits) -> SavedSandbox:
            saved = await environment.sandbox.save(folder / SAVED, limits)
            results = environment.results
            calls = folder / CALLS, results.digests(), results.everything()
            await asyncio.to_thread(records.write_calls, *calls)
            return saved

        async def work() -> LocalSnapshot:
            environment.check_ready()
            with crossing(SandboxError, f"lease {environment.lease_id}"):
                await environment.make_workspace()
            with metrics.snapshot_seconds.time():
                return await self.snapshots.take(
                    snapshot_id,
                    origin_of(environment),
                    write,
                    has_memory=self.driver.caps.memory,
                    terms=_terms(environment, ttl_s),
                )

        return await self.between_turns(environment, work)

    async def rollback(self, environment: LeasedEnvironment, snapshot_id: str) -> None:
        """Restore an environment to a snapshot that it has taken.

        Raises:
            UnknownIdError: it has taken no such snapshot, or has ended.
            HalfRestoredError: the disk failed in the middle of it: only a rollback is possible.
            EtudeError: the driver failed, and nothing has changed.
        """
        origin = origin_of(environment)

        async def work() -> None:
            if not environment.is_half_restored:
                environment.check_ready()
            snapshot = self.snapshots.find(
                origin.run_id, snapshot_id, lease_id=environment.lease_id
            )
            intent = environment.folder / ROLLBACK
            what = f"lease {environment.lease_id}"
            with crossing(SandboxError, what):
                records.write_json(intent, {"snapshot": snapshot.folder.name})
                try:
                    with crossing(SandboxError, what):
                        await self._restore(environment, snapshot)
                except HalfRestoredError:
                    # This process may repeat it, and the next one has to.
                    environment.is_half_restored = True
                    raise
                except EtudeError:
                    if not environment.is_half_restored:
                        intent.unlink()
                    raise

        await self.between_turns(environment, work)

    async def continue_rollback(self, environment: LeasedEnvironment) -> bool:
        """Repeat a predecessor's unfinished rollback; False if there was none.

        Raises:
            EtudeError: that is not possible, and the environment is lost.
        """
        said = records.read_json(environment.folder / ROLLBACK)
        if said is None:
            return False
        with crossing(SandboxError, f"lease {environment.lease_id}"):
            await self._restore(environment, self.snapshots.in_folder(str(said.get("snapshot"))))
        return True

    async def drop(self, environment: LeasedEnvironment, snapshot_id: str) -> None:
        """Remove a snapshot that an environment has taken.

        Raises:
            UnknownIdError: it has taken no such snapshot, or none that is still there.
        """
        origin = origin_of(environment)

        async def work() -> None:
            found = self.snapshots.find(origin.run_id, snapshot_id, lease_id=origin.lease_id)
            await self.snapshots.drop(found)

        await self.between_turns(environment, work)

    async def drop_graded(self, environment: LeasedEnvironment) -> None:
        """Remove the snapshot from which an environment was forked to be graded."""
        key = environment.record.held.run_id, environment.record.snapshot_id
        with contextlib.suppress(UnknownIdError):  # it started from none, or from one that is gone
            await self.snapshots.drop(self.snapshots.find(*key))

    async def start_from(self, environment: LeasedEnvironment, snapshot: LocalSnapshot) -> None:
        """Give a new environment the state of a snapshot, and none of its calls.

        Raises:
            EtudeError: the driver failed.
        """
        async with self.snapshots.using(snapshot) as folder:
            await environment.sandbox.restore(folder, snapshot.saved)

    async def pause(self, environment: LeasedEnvironment, *, until_unix_ms: int = 0) -> None:
        """Save an environment to the disk, and stop it.

        Args:
            environment: to pause.
            until_unix_ms: the end of one whose lease has expired; 0: its lease goes on.

        Raises:
            PreemptedError: it waits for a slot.
            EtudeError: the driver failed, and nothing has changed.
        """
        self.require_files("a paused environment is kept in files")

        async def work() -> None:
            if not until_unix_ms:
                refuse_preempted(environment.record.held)
            await _suspend(environment, {"until_unix_ms": until_unix_ms})
            environment.record.held.preempted = False

        await self.between_turns(environment, work)

    async def preempt(self, environment: LeasedEnvironment) -> bool:
        """Pause an environment for leases of another class, unless that takes something from it.

        Raises:
            EtudeError: the driver failed or saves no files, and nothing has changed.
        """
        self.require_files("it is not preempted")

        async def work() -> bool:
            is_able = environment.can_pause and not environment.is_half_restored
            # Another order may have paused it meanwhile.
            if not is_able or environment.record.held.preempted:
                return False
            pause = {"until_unix_ms": 0, "preempted": True, "was_paused": environment.is_paused}
            await _suspend(environment, pause)
            environment.record.held.preempted = True
            return True

        return await self.between_turns(environment, work)

    async def resume_preempted(self, environment: LeasedEnvironment) -> None:
        """Resume a preempted environment; one that its holder had paused before stays paused.

        Raises:
            EtudeError: the driver failed, and it is still preempted.
        """

        async def work() -> None:
            held, marker = environment.record.held, environment.folder / PAUSED
            if not held.preempted:
                return
            with crossing(SandboxError, f"lease {environment.lease_id}"):
                if (records.read_json(marker) or {}).get("was_paused"):
                    records.write_json(marker, {"until_unix_ms": 0})
                else:
                    await environment.sandbox.resume()
                    marker.unlink()
                    environment.is_paused = False
            held.preempted = False

        await self.between_turns(environment, work)

    async def resume(self, environment: LeasedEnvironment) -> None:
        """Resume a paused environment.

        Raises:
            PreemptedError: it waits for a slot.
            EtudeError: the driver failed, and it is still paused.
        """

        async def work() -> None:
            refuse_preempted(environment.record.held)
            if environment.is_paused:
                with crossing(SandboxError, f"lease {environment.lease_id}"):
                    await environment.sandbox.resume()
                    (environment.folder / PAUSED).unlink()
                environment.is_paused = False

        await self.between_turns(environment, work)

    async def continue_pause(self, environment: LeasedEnvironment) -> int | None:
        """Finish a predecessor's pause.

        Returns:
            None if it is not paused; the end of one whose lease has expired, in Unix milliseconds;
            0 if its lease goes on.

        Raises:
            CorruptError: its record is damaged.
        """
        said = records.read_json(environment.folder / PAUSED)
        if said is None:
            return None
        until_unix_ms = said.get("until_unix_ms")
        if not isinstance(until_unix_ms, int):
            raise CorruptError(f"{environment.folder / PAUSED}: until_unix_ms is not a number")
        self.require_files("a paused environment is kept in files")
        await self.between_turns(environment, lambda: _suspend(environment, said))
        environment.record.held.preempted = said.get("preempted") is True
        return until_unix_ms

    def require_files(self, why: str) -> None:
        """Check that the driver can save files.

        Raises:
            CapMissingError: it cannot save files.
        """
        if not self.driver.caps.files:
            raise CapMissingError(self.driver.name, "files", why)

    async def _restore(self, environment: LeasedEnvironment, snapshot: LocalSnapshot) -> None:
        """Restore files and calls; after an error both are unchanged.

        Raises:
            HalfRestoredError: only one of them was restored.
        """
        calls = environment.folder / CALLS
        partial = calls.with_name(f"{CALLS}.partial")
        async with self.snapshots.using(snapshot) as folder:
            # What can fail for want of space comes first.
            await asyncio.to_thread(shutil.copyfile, snapshot.folder / CALLS, partial)
            found = records.read_calls(partial)
            await environment.end_programs()
            await environment.sandbox.restore(folder, snapshot.saved)
            with crossing(HalfRestoredError, f"the calls of lease {environment.lease_id}"):
                partial.rename(calls)
                environment.replace_history(found)
                (environment.folder / ROLLBACK).unlink()
            environment.is_half_restored = False

    async def between_turns(
        self, environment: LeasedEnvironment, work: Callable[[], Awaitable[_T]]
    ) -> _T:
        """Run work between two turns, to its end even if the caller leaves.

        Raises:
            UnknownIdError: the lease has ended.
        """

        async def alone() -> _T:
            async with environment.turn:
                environment.check_open()
                return await work()

        task = asyncio.create_task(alone(), name=f"state of {environment.lease_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)


async def _suspend(environment: LeasedEnvironment, pause: Mapping[str, object]) -> None:
    """Record a pause and carry it out; the turn is held.

    Raises:
        EtudeError: the driver failed, and nothing has changed.
    """
    marker, what = environment.folder / PAUSED, f"lease {environment.lease_id}"
    with crossing(SandboxError, what):
        before = records.read_json(marker)
        records.write_json(marker, pause)
        was_paused, environment.is_paused = environment.is_paused, True
        try:
            with crossing(SandboxError, what):
                await environment.end_programs()
                await environment.sandbox.pause()
        except EtudeError:
            environment.is_paused = was_paused
            if not was_paused:
                marker.unlink()
            elif before is not None:
                records.write_json(marker, before)
            raise


def _terms(environment: LeasedEnvironment, ttl_s: float) -> SnapshotTerms:
    record = environment.record
    return SnapshotTerms(
        ttl_s=ttl_s,
        control_digest=token_digest(record.held.lease.control_token),
        is_prepared=record.is_prepared and not environment.results.digests(),
        setup_files=record.setup_files,
    )


def origin_of(environment: LeasedEnvironment) -> SnapshotOrigin:
    """Origin of an environment's snapshots."""
    record = environment.record
    return SnapshotOrigin(
        run_id=record.held.run_id,
        lease_id=record.lease_id,
        template=record.template,
        uri=record.uri,
        source_key=record.source_key,
    )
