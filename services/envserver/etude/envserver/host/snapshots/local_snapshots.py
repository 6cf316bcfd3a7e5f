"""Snapshots on a host: created within quotas, found, expired, adopted by the next process.

snapshots/<random name>/state.json    written last: the snapshot exists from then on
                       /calls.jsonl   the calls that its lease had made by then
                       /saved/        what the driver wrote
"""

import asyncio
import contextlib
import hmac
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.errors import (
    CorruptError,
    EtudeError,
    ForbiddenError,
    FullError,
    InvalidFieldError,
    ReusedIdError,
    UnknownIdError,
    crossing,
)
from etude.envserver import metrics
from etude.envserver.drivers.base import SandboxError, SavedSandbox
from etude.envserver.host.leases.records import STATE
from etude.envserver.host.snapshots import snapshot_record
from etude.envserver.host.snapshots.snapshot_record import (
    NO_TERMS,
    SAVED,
    LocalSnapshot,
    SnapshotOrigin,
    SnapshotTerms,
    token_digest,
)
from etude.envserver.storage import folders
from etude.envserver.storage.folders import FolderLimits, TooLargeError
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

SNAPSHOT_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
RETRY_AFTER_S = 30.0
"""Snapshots end with their leases' rollouts, which take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotQuota:
    """Quotas of snapshots on a host."""

    max_snapshots: int = 512
    """Of one run: 64 environments with 8 checkpoints each."""
    max_on_node: int = 4096
    """Of all runs: every heartbeat names each of them, in about 200 bytes."""
    max_bytes: int = 16 << 30
    """Of one run: 512 snapshots of 32 MiB, the size of a VM that has worked for a while."""
    max_entries: int = 200_000
    """Files and folders of one snapshot; a repository with its dependencies has 50,000."""
    reserve_bytes: int = 512 << 20
    """Left free on the disk: twice the reserve for opening an environment."""
    ttl_s: float = 86_400
    """Longest life of a snapshot: the longest of a lease."""
    grace_s: float = 900
    """How long snapshots outlive their run's last lease on this host: brokers remember as long."""


class NoRoomError(FullError):
    """A run or a disk has no room for one more snapshot."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: drop snapshots that are not needed", retry_after_s=RETRY_AFTER_S)


Write = Callable[[Path, FolderLimits], Awaitable[SavedSandbox]]
"""Saves into an empty folder, within limits, with a call log next to it."""


@dataclass(slots=True)
class LocalSnapshots:
    """Snapshots by run and id. A snapshot in use is removed only after its last reader."""

    folder: Path
    quota: SnapshotQuota = field(default_factory=SnapshotQuota)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when one was taken: leases that begin with it wait for the heartbeat that names it."""
    _kept: dict[tuple[str, str], LocalSnapshot] = field(default_factory=dict)
    _making: Counter[str] = field(default_factory=Counter)
    """Snapshots being made, by run."""
    _making_keys: set[tuple[str, str]] = field(default_factory=set)
    _granted_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes that each of them may still write."""
    _uses: Counter[Path] = field(default_factory=Counter)
    _doomed: set[Path] = field(default_factory=set)
    """Dropped while in use."""
    _seen_s: dict[str, float] = field(default_factory=dict)
    """When each run last held a lease, by the monotonic clock."""

    def held_snapshots(self) -> list[environments_pb2.HeldSnapshot]:
        """Every snapshot, for the broker."""
        return [
            environments_pb2.HeldSnapshot(
                snapshot_id=each.snapshot_id,
                run_id=each.origin.run_id,
                template=each.origin.template,
            )
            for each in self._kept.values()
        ]

    def find(self, run_id: str, snapshot_id: str, *, lease_id: str | None = None) -> LocalSnapshot:
        """Find a run's snapshot, or only one of a given lease.

        Raises:
            UnknownIdError: there is none, or it is another run's or lease's.
        """
        found = self._kept.get((run_id, snapshot_id))
        if found is None or lease_id not in {None, found.origin.lease_id}:
            raise UnknownIdError(f"this host holds no such snapshot {snapshot_id[:128]!r}")
        return found

    def of_lease(self, lease_id: str, control_token: str) -> list[LocalSnapshot]:
        """Snapshots of a lease, which may have ended.

        Raises:
            ForbiddenError: another token than the lease's.
        """
        found = [each for each in self._kept.values() if each.origin.lease_id == lease_id]
        digest = token_digest(control_token)
        if any(not hmac.compare_digest(each.terms.control_digest, digest) for each in found):
            raise ForbiddenError(f"lease {lease_id}: this takes the control token")
        return found

    def in_folder(self, name: str) -> LocalSnapshot:
        """The snapshot in the folder of this name.

        Raises:
            UnknownIdError: it is gone.
        """
        for snapshot in self._kept.values():
            if snapshot.folder.name == name:
                return snapshot
        raise UnknownIdError(f"this host holds no snapshot in {name}")

    @contextlib.asynccontextmanager
    async def using(self, snapshot: LocalSnapshot) -> AsyncIterator[Path]:
        """Folder of the driver's files, which stay while the block runs."""
        self._uses[snapshot.folder] += 1
        try:
            yield snapshot.folder / SAVED
        finally:
            self._uses[snapshot.folder] -= 1
            if not self._uses[snapshot.folder]:
                del self._uses[snapshot.folder]
                if snapshot.folder in self._doomed:
                    self._doomed.discard(snapshot.folder)
                    await asyncio.to_thread(_remove_or_log, snapshot.folder)

    async def take(
        self,
        snapshot_id: str,
        origin: SnapshotOrigin,
        write: Write,
        *,
        has_memory: bool,
        terms: SnapshotTerms = NO_TERMS,
    ) -> LocalSnapshot:
        """Make a snapshot, or return the existing one.

        Raises:
            InvalidFieldError: the id is invalid.
            ReusedIdError: another lease of the run has taken one of this id.
            NoRoomError: the run or the disk has no room.
            SandboxError: it could not be written.
        """
        if not SNAPSHOT_ID.match(snapshot_id):
            raise InvalidFieldError("snapshot_id", "letters, digits and ._- only, 128 at most")
        key = (origin.run_id, snapshot_id)
        present = self._kept.get(key)
        if present is not None and present.origin.lease_id == origin.lease_id:
            return present
        if present is not None or key in self._making_keys:
            raise ReusedIdError(f"snapshot {snapshot_id!r} is another lease's")
        limits = self._room(origin.run_id)
        self._making[origin.run_id] += 1
        self._making_keys.add(key)
        self._granted_bytes[key] = limits.max_bytes
        try:
            folder = self.folder / secrets.token_hex(12)
            saved = await self._write(folder, key, write, limits)
            made = LocalSnapshot(
                snapshot_id=snapshot_id,
                origin=origin,
                saved=saved,
                has_memory=has_memory,
                created_unix_ms=round(1000 * time.time()),
                folder=folder,
                terms=terms,
            )
            await self._commit(made)
        finally:
            self._making[origin.run_id] -= 1
            self._making_keys.discard(key)
            del self._granted_bytes[key]
        self._kept[key] = made
        self.taken.set()
        self._count()
        return made

    async def drop(self, snapshot: LocalSnapshot) -> None:
        """Remove a snapshot, after its last reader."""
        self._kept.pop(snapshot.key, None)
        # From here on a successor would not find it either.
        (snapshot.folder / STATE).unlink(missing_ok=True)
        if self._uses[snapshot.folder]:
            self._doomed.add(snapshot.folder)
        else:
            await asyncio.to_thread(_remove_or_log, snapshot.folder)
        self._count()

    async def remove_expired(
        self, runs: Collection[str], *, now_s: float, now_unix_ms: int
    ) -> list[str]:
        """Remove snapshots that are too old, and those of runs without leases."""
        self._seen_s.update(dict.fromkeys(runs, now_s))
        over = [
            snapshot
            for snapshot in self._kept.values()
            if not self._uses[snapshot.folder]
            and (
                self.expires_unix_ms(snapshot) <= now_unix_ms
                or now_s - self._seen_s.setdefault(snapshot.origin.run_id, now_s)
                > self.quota.grace_s
            )
        ]
        for snapshot in over:
            await self.drop(snapshot)
        living = {run_id for run_id, _ in self._kept} | set(runs)
        self._seen_s = {run: seen for run, seen in self._seen_s.items() if run in living}
        return [snapshot.snapshot_id for snapshot in over]

    def expires_unix_ms(self, snapshot: LocalSnapshot) -> int:
        """Latest time of its removal."""
        return snapshot.created_unix_ms + round(1000 * min(snapshot.terms.ttl_s, self.quota.ttl_s))

    def take_over(self) -> int:
        """Adopt a predecessor's finished snapshots, remove others; returns how many it adopted."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in sorted(self.folder.iterdir()):
            try:
                snapshot = snapshot_record.load_record(folder)
            except CorruptError as error:
                log.warning("snapshot %s is not adopted: %s", folder.name, error)
                _remove_or_log(folder)
            else:
                self._kept[snapshot.key] = snapshot
        self._count()
        return len(self._kept)

    async def _write(
        self, folder: Path, key: tuple[str, str], write: Write, limits: FolderLimits
    ) -> SavedSandbox:
        """Write a run's snapshot into a new folder, all or nothing.

        Raises:
            NoRoomError: it is too large.
            EtudeError: it could not be written.
        """
        run_id, snapshot_id = key
        try:
            with crossing(SandboxError, f"snapshot {snapshot_id}"):
                (folder / SAVED).mkdir(mode=0o700, parents=True)
                saved = await write(folder, limits)
                self._check_bytes(run_id, saved.num_bytes)
        except TooLargeError as error:
            await asyncio.to_thread(_remove_or_log, folder)
            raise NoRoomError(f"snapshot {snapshot_id!r} does not fit: {error}") from error
        except EtudeError:
            await asyncio.to_thread(_remove_or_log, folder)
            raise
        return saved

    async def _commit(self, made: LocalSnapshot) -> None:
        """Make a snapshot durable, or remove it.

        Raises:
            EtudeError: the disk failed.
        """
        try:
            with crossing(SandboxError, f"snapshot {made.snapshot_id}"):
                await asyncio.to_thread(snapshot_record.write_record, made)
        except EtudeError:
            await asyncio.to_thread(_remove_or_log, made.folder)
            raise

    def _room(self, run_id: str) -> FolderLimits:
        """Limits of one more snapshot of a run.

        Raises:
            NoRoomError: there is no room.
        """
        mine = [each for each in self._kept.values() if each.origin.run_id == run_id]
        if len(mine) + self._making[run_id] >= self.quota.max_snapshots:
            raise NoRoomError(
                f"run {run_id!r} has {self.quota.max_snapshots} snapshots on this host"
            )
        if len(self._kept) + self._making.total() >= self.quota.max_on_node:
            raise NoRoomError(f"this host holds {self.quota.max_on_node} snapshots")
        left = self.quota.max_bytes - sum(each.saved.num_bytes for each in mine)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize - self.quota.reserve_bytes
        # Half of the space not granted to others: so later snapshots get some too, and all of
        # them together leave the reserve alone.
        free = (free - self._granted_bytes.total()) // 2
        if free <= 0:
            raise NoRoomError(
                f"the disk keeps its last {self.quota.reserve_bytes >> 20} MiB for leases"
            )
        return FolderLimits(max_files=self.quota.max_entries, max_bytes=min(left, free))

    def _check_bytes(self, run_id: str, num_bytes: int) -> None:
        """Check the quota again: several snapshots may have been made at a time.

        Raises:
            NoRoomError: together they are too large.
        """
        mine = (each for each in self._kept.values() if each.origin.run_id == run_id)
        if sum(each.saved.num_bytes for each in mine) + num_bytes > self.quota.max_bytes:
            raise NoRoomError(f"run {run_id!r} has {self.quota.max_bytes >> 20} MiB for snapshots")

    def _count(self) -> None:
        metrics.snapshots.set(len(self._kept))
        metrics.snapshot_bytes.set(sum(each.saved.num_bytes for each in self._kept.values()))


def _remove_or_log(folder: Path) -> None:
    try:
        folders.remove_folder(folder)
    except OSError:
        log.exception("%s stays on the disk", folder)
