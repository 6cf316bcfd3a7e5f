"""Checkpoints of containers as files, verified by digest before a restore.

A checkpoint holds memory, processes and files. Its folder must not be writable by tenants; the host
keeps its digest, and checks it before a restore.
"""

import shutil
from pathlib import Path

from blake3 import blake3

from etude.common.errors import CorruptError
from etude.envserver.drivers import folder_snapshots
from etude.envserver.drivers.base import SavedSandbox
from etude.envserver.drivers.gvisor.container import CONFIG
from etude.envserver.storage.folders import FolderLimits

IMAGE = "image"
_PART_BYTES = 8 << 20


def measure(target: Path, config: bytes, lease: Path, limits: FolderLimits) -> SavedSandbox:
    """Measure a new checkpoint, and add the bundle's config and the tools' notes to it.

    Raises:
        TooLargeError: the limits are exceeded.
    """
    (target / CONFIG).write_bytes(config)
    num_bytes = sum(path.stat().st_size for path in _files(target))
    main = SavedSandbox(num_bytes=num_bytes, digest=digest(target))
    return folder_snapshots.save_notes(main, lease, target, limits)


def prepare(source: Path, lease: Path, saved: SavedSandbox) -> None:
    """Verify a checkpoint, and copy its notes to the lease's folder for replace_notes().

    Raises:
        CorruptError: it is not what was saved.
    """
    if digest(source) != folder_snapshots.main_digest(saved):
        raise CorruptError(f"{source} is not what was saved")
    folder_snapshots.prepare_notes(source, lease, saved)


def digest(folder: Path) -> str:
    """Digest of a checkpoint and its bundle."""
    hasher = blake3()
    for path in _files(folder):
        hasher.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                hasher.update(part)
    return hasher.hexdigest()


def remove(folder: Path) -> None:
    """Remove a checkpoint, complete or not."""
    shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return [folder / CONFIG, *sorted((folder / IMAGE).iterdir())]
