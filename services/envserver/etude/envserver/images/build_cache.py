"""Build cache: a folder of finished entries, each at the address of its inputs."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from etude.envserver.storage import folders

_PARTIAL = "partial"


class BuildCache:
    """Entries are complete or absent, also after kill -9 and with concurrent builders."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def find(self, kind: str, address: str) -> Path | None:
        """The entry, if it exists."""
        entry = self.root / kind / address
        return entry if entry.is_dir() else None

    def entries(self, kind: str) -> list[Path]:
        """Entries of a kind, oldest first, without those removed meanwhile."""
        folder = self.root / kind
        found = list[tuple[int, Path]]()
        for each in folder.iterdir() if folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):
                if each.is_dir():
                    found.append((each.stat().st_mtime_ns, each))
        return [each for _, each in sorted(found)]

    def entry(self, kind: str, address: str, build: Callable[[Path], None]) -> Path:
        """The entry, built if it is missing: `build` fills an empty folder next to it.

        A second builder of the same entry waits for the first; if that one dies, it builds.
        """
        if (found := self.find(kind, address)) is not None:
            return found
        with self._lock(f"{kind}-{address}"):
            if (found := self.find(kind, address)) is not None:
                return found
            return self._build(kind, address, build)

    def remove(self, kind: str, address: str) -> bool:
        """Remove an entry atomically; False if it is in use. A missing entry counts as removed."""
        with self._lock(f"{kind}-{address}"):
            entry = self.find(kind, address)
            if entry is None:
                return True
            if not _is_free(entry):
                return False
            going = self._private_folder(_PARTIAL) / f"gone-{kind}-{address}"
            shutil.rmtree(going, ignore_errors=True)
            entry.rename(going)
            shutil.rmtree(going)
            return True

    def _build(self, kind: str, address: str, build: Callable[[Path], None]) -> Path:
        target = self.root / kind / address
        self._private_folder(kind)
        partial = self.root / _PARTIAL / f"{kind}-{address}"
        # Left by a builder that was killed; the holder of the lock may remove it.
        shutil.rmtree(partial, ignore_errors=True)
        self._private_folder(_PARTIAL)
        partial.mkdir()
        try:
            build(partial)
            _flush(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return target

    def _private_folder(self, name: str) -> Path:
        """A folder for root alone: programs in it may be set to run as root, and are not ours."""
        folder = self.root / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the cache's own file system, gone afterwards."""
        folder = self._private_folder(_PARTIAL)
        name = tempfile.mkdtemp(dir=folder, prefix="scratch-")
        try:
            yield Path(name)
        finally:
            # What an image left may be deeper than Python's own removal goes.
            folders.remove_folder(Path(name))


def hold(entry: Path) -> int | None:
    """Keep an entry from being removed until the file descriptor is closed, or its process ends.

    Returns:
        None if it was removed meanwhile.
    """
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if entry.is_dir() and os.path.samestat(os.fstat(descriptor), entry.stat()):
        return descriptor
    os.close(descriptor)
    return None


def _is_free(entry: Path) -> bool:
    descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _flush(folder: Path) -> None:
    """Bring an entry to the disk before its name says that it is complete.

    Raises:
        OSError: the disk did not take it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # One call for a tree of thousands of files, where os.sync() would wait for every disk.
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)


_libc = ctypes.CDLL(None, use_errno=True)
