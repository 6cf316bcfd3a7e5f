"""SnapshotStore: snapshots in an object store, where they outlive their host.

<run>/<snapshot>/part-000000 …   the snapshot's folder as one stream, in parts
                /manifest        written last: its origin, and the digest of every part

Both names are digests, so that no name of a run can lead elsewhere. The client gets the manifest's
digest, and gives it to the host that fetches the snapshot: write access to the store is not enough
to forge one.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3
from typing_extensions import override

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, StoreError, UnknownIdError, WrongStateError, crossing
from etude.envserver.drivers.base import CapMissingError, Driver, SandboxError, SavedSandbox
from etude.envserver.host.leases.records import CALLS
from etude.envserver.host.snapshots.local_snapshots import LocalSnapshots
from etude.envserver.host.snapshots.snapshot_record import SAVED, LocalSnapshot, SnapshotOrigin
from etude.envserver.storage import packing
from etude.envserver.storage.folders import FolderLimits

log = logging.getLogger(__name__)

VERSION = 1
PART_BYTES = 8 << 20
MAX_MANIFEST_BYTES = 1 << 20
"""16 GiB are 2,048 parts, of 80 bytes each."""
MANIFEST = "manifest"
_OURS = re.compile(r"^[0-9a-f]{32}/[0-9a-f]{32}/(manifest|part-[0-9]{6})$")
SWEEP_EVERY_S = 3_600.0
SLACK_S = 3_600.0
"""How much longer than on its host a snapshot stays in the store: clocks differ."""


class SharedSnapshot(NamedTuple):
    """A snapshot in the store."""

    digest: str
    num_bytes: int


class SharedSnapshotRef(NamedTuple):
    """Reference to a shared snapshot of a run."""

    snapshot_id: str
    digest: str
    """Digest of the manifest, from share()."""


class NoSnapshotStoreError(WrongStateError):
    """The pool has no snapshot store."""

    reason = "NoSnapshotStore"


@dataclass(slots=True)
class SnapshotStore:
    """The shared snapshots of a pool's hosts."""

    store: Store
    driver: Driver

    async def share(self, snapshots: LocalSnapshots, snapshot: LocalSnapshot) -> SharedSnapshot:
        """Upload a snapshot; the same one again changes nothing.

        Raises:
            CapMissingError: it is usable on its own host only.
            SandboxError: it cannot be read.
            StoreError: the store is unavailable. The local snapshot stays.
        """
        if snapshot.has_memory:
            raise CapMissingError(
                self.driver.name,
                "portable",
                "its snapshots hold memory, which is usable only with the template of this host",
            )
        what = f"sharing snapshot {snapshot.snapshot_id}"
        with crossing(SandboxError, what):
            async with snapshots.using(snapshot) as saved:
                return await asyncio.to_thread(self._upload, snapshot, saved.parent)

    async def fetch(
        self,
        snapshots: LocalSnapshots,
        origin: SnapshotOrigin,
        wanted: SharedSnapshotRef,
        snapshot_id: str,
    ) -> LocalSnapshot:
        """Download a shared snapshot to this host.

        Args:
            snapshots: of this host.
            origin: the lease that it is for.
            wanted: the id under which it was shared, in the same run, and its digest.
            snapshot_id: its id here.

        Raises:
            UnknownIdError: the run has shared no such snapshot, or it was removed.
            CorruptError: it is not what was shared, or of other first files.
            StoreError: the store is unavailable.
            EtudeError: of LocalSnapshots.take().
        """

        async def write(folder: Path, limits: FolderLimits) -> SavedSandbox:
            return await asyncio.to_thread(self._download, folder, limits, origin, wanted)

        return await snapshots.take(snapshot_id, origin, write, has_memory=False)

    async def remove(self, run_id: str, snapshot_id: str) -> None:
        """Remove a snapshot from the store; what cannot be removed now is swept later."""
        try:
            await asyncio.to_thread(self._remove, store_prefix(run_id, snapshot_id))
        except StoreError as error:
            log.warning(
                "shared snapshot %s is not removed now, the sweep will: %s", snapshot_id, error
            )

    @contextlib.asynccontextmanager
    async def sweep_periodically(self, ttl_s: float) -> AsyncIterator[None]:
        """Remove expired objects hourly, while the block runs."""
        sweeping = asyncio.create_task(self._sweep_forever(ttl_s + SLACK_S), name="sweep snapshots")
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.wait([sweeping])

    async def _sweep_forever(self, older_than_s: float) -> None:
        while True:
            try:
                removed = await asyncio.to_thread(self.sweep, older_than_s)
            except StoreError as error:
                log.warning("shared snapshots are not swept: %s", error)
            else:
                log.log(logging.INFO if removed else logging.DEBUG, "swept %d objects", removed)
            await asyncio.sleep(SWEEP_EVERY_S)

    def sweep(self, older_than_s: float) -> int:
        """Remove objects older than the newest by this much; returns their number.

        So only the store's clock counts. Foreign objects below the prefix stay.
        """
        infos = [info for info in self.store.list("") if _OURS.match(info.key)]
        newest_s = max((info.modified_s for info in infos), default=0.0)
        old = [info.key for info in infos if info.modified_s + older_than_s < newest_s]
        self.store.delete(old)
        return len(old)

    def _upload(self, snapshot: LocalSnapshot, folder: Path) -> SharedSnapshot:
        prefix = store_prefix(*snapshot.key)
        parts: list[tuple[int, str]] = []
        for number, part in enumerate(_split_into_parts(_stream(folder))):
            self.store.put(f"{prefix}/part-{number:06d}", part)
            parts.append((len(part), blake3(part).hexdigest()))
        said = {
            "version": VERSION,
            "driver": self.driver.name,
            "snapshot_id": snapshot.snapshot_id,
            "origin": snapshot.origin._asdict(),
            "saved": asdict(snapshot.saved),
            "parts": parts,
        }
        manifest = json.dumps(said, sort_keys=True).encode()
        self.store.put(f"{prefix}/{MANIFEST}", manifest)
        return SharedSnapshot(blake3(manifest).hexdigest(), sum(size for size, _ in parts))

    def _download(
        self, folder: Path, limits: FolderLimits, origin: SnapshotOrigin, wanted: SharedSnapshotRef
    ) -> SavedSandbox:
        prefix = store_prefix(origin.run_id, wanted.snapshot_id)
        try:
            said = self._manifest(prefix, wanted.digest)
            self._check(said, origin)
            parts = [(int(size), str(digest)) for size, digest in said["parts"]]
            saved = SavedSandbox(**said["saved"])
        except (KeyError, TypeError, ValueError) as cause:
            raise CorruptError(
                f"the manifest of {wanted.snapshot_id!r} is none: {cause!r}"
            ) from cause
        (folder / SAVED).rmdir()
        packing.unpack_folder(_PartReader(self.store, prefix, iter(parts)), folder, limits)
        if not (folder / SAVED).is_dir() or not (folder / CALLS).is_file():
            raise CorruptError(f"shared snapshot {wanted.snapshot_id!r} lacks files or calls")
        return saved

    def _manifest(self, prefix: str, digest: str) -> dict[str, Any]:
        """Read the manifest of a snapshot.

        Raises:
            UnknownIdError: there is none.
            CorruptError: it has another digest or version.
        """
        key = f"{prefix}/{MANIFEST}"
        info = self.store.head(key)
        if info is None:
            raise UnknownIdError("this run has shared no such snapshot, or it was removed")
        if info.size > MAX_MANIFEST_BYTES:
            raise CorruptError(f"{key}: {info.size} bytes are too large for a manifest")
        data = self.store.get_range(key, 0, info.size)
        if blake3(data).hexdigest() != digest:
            raise CorruptError(f"{key}: has another digest than the one given")
        said = json.loads(data)
        if not isinstance(said, dict) or said["version"] != VERSION:
            raise CorruptError(f"{key}: is of another version")
        return said

    def _check(self, said: dict[str, Any], origin: SnapshotOrigin) -> None:
        """Check that a snapshot fits a lease.

        Raises:
            CorruptError: it is of another driver, template or first files.
        """
        was = SnapshotOrigin(**said["origin"])
        pairs = (
            ("driver", said["driver"], self.driver.name),
            ("run", was.run_id, origin.run_id),
            ("template", was.template, origin.template),
            ("first files", was.source_key, origin.source_key),
        )
        for what, one, other in pairs:
            if one != other:
                raise CorruptError(f"the shared snapshot is of another {what}: {one!r}")

    def _remove(self, prefix: str) -> None:
        keys = [info.key for info in self.store.list(f"{prefix}/")]
        # Without its manifest it is not a snapshot, whatever else stays.
        self.store.delete(sorted(keys, key=lambda key: not key.endswith(f"/{MANIFEST}")))


def store_prefix(run_id: str, snapshot_id: str) -> str:
    """Prefix of a run's snapshot in the store."""
    run, snapshot = (blake3(name.encode()).hexdigest(length=16) for name in (run_id, snapshot_id))
    return f"{run}/{snapshot}"


def _stream(folder: Path) -> Iterator[bytes]:
    """A snapshot's folder as a stream, without its state file, which the manifest replaces."""
    for entry in (SAVED, CALLS):
        yield from packing.pack_folder(folder, entry)


def _split_into_parts(stream: Iterator[bytes]) -> Iterator[bytes]:
    """Split the stream into parts of one size; one part at least."""
    part = bytearray()
    for piece in stream:
        part += piece
        while len(part) >= PART_BYTES:
            yield bytes(part[:PART_BYTES])
            del part[:PART_BYTES]
    yield bytes(part)


@dataclass(slots=True)
class _PartReader(packing.ByteReader):
    """The stream joined from its parts."""

    store: Store
    prefix: str
    left: Iterator[tuple[int, str]]
    _part: bytes = b""
    _position: int = 0
    _number: int = 0

    @override
    def read(self, size: int, /) -> bytes:
        found = bytearray()
        while len(found) < size:
            if self._position == len(self._part) and not self._fetch_next_part():
                break
            piece = self._part[self._position : self._position + size - len(found)]
            self._position += len(piece)
            found += piece
        return bytes(found)

    def _fetch_next_part(self) -> bool:
        """Fetch the next part.

        Raises:
            CorruptError: it is not the one that was shared, or is gone.
        """
        following = next(self.left, None)
        if following is None:
            return False
        size, digest = following
        key = f"{self.prefix}/part-{self._number:06d}"
        if not 0 <= size <= PART_BYTES:
            raise CorruptError(f"{key}: {size} bytes are not a valid part size")
        try:
            data = self.store.get_range(key, 0, size)
        except MissingError as cause:
            raise CorruptError(f"{key}: is gone") from cause
        if blake3(data).hexdigest() != digest:
            raise CorruptError(f"{key}: is damaged")
        self._part, self._position, self._number = data, 0, self._number + 1
        return True
