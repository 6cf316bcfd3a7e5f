"""Containers as files: written, measured, and believed again only if nothing has changed them.

A checkpoint holds memory, processes and files. It lies where no tenant can write; its digest is the
node's own, and is checked before a kernel sees it.
"""

import shutil
from pathlib import Path

from blake3 import blake3

from etude.agent.workspace import notes
from etude.common.errors import CorruptError
from etude.envserver import folders
from etude.envserver.drivers import saving
from etude.envserver.drivers.base import Saved
from etude.envserver.drivers.gvisor.container import CONFIG
from etude.envserver.folders import Limits, TooLargeError

IMAGE = "image"
_CODE_DIGITS = 64
"""Of a digest those of the container, which those of what tools have noted follow."""
_PART_BYTES = 8 << 20


def sealed(target: Path, config: bytes, lease: Path, limits: Limits) -> Saved:
    """Measure a checkpoint that was just written, and put what belongs to it beside it.

    Args:
        target: the folder that holds it.
        config: of the bundle it was made of.
        lease: whose it is.
        limits: of all together.

    Raises:
        TooLargeError: it is larger than they allow.
        OSError: something cannot be read or written.
    """
    (target / CONFIG).write_bytes(config)
    num_bytes = sum(path.stat().st_size for path in _files(target))
    if num_bytes > limits.max_bytes:
        raise TooLargeError(f"the environment takes {num_bytes} bytes")
    left = limits._replace(max_bytes=limits.max_bytes - num_bytes)
    noted = saving.save(lease, _parts(), target, left)
    return Saved(num_bytes=num_bytes + noted.num_bytes, digest=digest(target) + noted.digest)


def prepare(source: Path, lease: Path, saved: Saved) -> None:
    """See that it is what was saved, and put what tools had noted beside what a lease has.

    Raises:
        CorruptError: it is something else.
        OSError: it cannot be read.
    """
    if digest(source) != saved.digest[:_CODE_DIGITS]:
        raise CorruptError(f"{source} is not what was saved")
    noted = Saved(num_bytes=0, digest=saved.digest[_CODE_DIGITS:])
    saving.prepare(source, _parts(), lease, noted)


def replace_notes(lease: Path) -> None:
    """Let what was prepared be what tools have noted."""
    saving.replace(_parts(), lease)


def digest(folder: Path) -> str:
    """Of a checkpoint and its bundle.

    Raises:
        OSError: it cannot be read.
    """
    hasher = blake3()
    for path in _files(folder):
        hasher.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                hasher.update(part)
    return hasher.hexdigest()


def remove(folder: Path) -> None:
    """Take a checkpoint away, wherever it was interrupted."""
    shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return [folder / CONFIG, *sorted((folder / IMAGE).iterdir())]


def _parts() -> saving.Parts:
    return {notes.FOLDER: folders.current_owner()}
