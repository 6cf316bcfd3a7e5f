"""Delta files, authenticated with this host's key.

A VMM trusts what it restores: a forged stream could take it over. So each file carries a keyed
BLAKE3 over its content, which is checked before a restore. The folder must not be writable by
tenants. A file that was verified is verified again once its size or modification time changes.
A disk of the same moment is a file of its own in the same folder, named and verified by the digest
that the delta holds: one without the other is refused.
"""

import contextlib
import hmac
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from etude.envserver.drivers.vm import disk
from etude.envserver.drivers.vm.errors import IntegrityError
from etude.envserver.drivers.vm.interface import VmDelta

KEY_BYTES = 32
_MAGIC = b"ETUDEVM2"
_CODE_BYTES = 32
_HEADER = struct.Struct(">32s?QQ32s")
"""Template address, is_full, bytes of memory, bytes of stream, digest of the disk."""
_DISK_OFFSET = _HEADER.size - disk.DIGEST_BYTES
HEADER_BYTES = len(_MAGIC) + _CODE_BYTES + _HEADER.size
_PART_BYTES = 8 << 20
_MOST_PROVEN = 1024


class VerifiedFiles:
    """Cache of files that this process has verified: they are not read again.

    Sixteen forks of one VM would read its file 32 times.
    """

    def __init__(self) -> None:
        self._codes: OrderedDict[tuple[int, ...], bytes] = OrderedDict()

    def is_verified(self, about: os.stat_result, code: bytes) -> bool:
        """Tell whether a file was verified to have this code."""
        which = _identity(about)
        if self._codes.get(which) != code:
            return False
        self._codes.move_to_end(which)
        return True

    def add(self, about: os.stat_result, code: bytes) -> None:
        self._codes[_identity(about)] = code
        if len(self._codes) > _MOST_PROVEN:
            self._codes.popitem(last=False)


def save(delta: VmDelta, path: Path, *, key: bytes) -> None:
    """Write a delta atomically. Takes 1 ms a MiB: call it on a thread.

    Its disk is the partial one in the same folder.
    """
    size = os.fstat(delta.stream).st_size - delta.offset
    template = bytes.fromhex(delta.template)
    found = disk.keep(path.parent, delta.disk)
    header = _HEADER.pack(template, delta.is_full, delta.changed_bytes, size, found)
    parts = _parts(delta.stream, delta.offset, size)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(bytes(HEADER_BYTES))
            code = blake3(header, key=key)
            for part in parts:
                code.update(part)
                file.write(part)
            file.seek(0)
            file.write(_MAGIC + code.digest() + header)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def load(
    path: Path, *, key: bytes, template: str, verified: VerifiedFiles | None = None
) -> VmDelta:
    """Load a delta that this host wrote for this template. Call it on a thread.

    Raises:
        IntegrityError: it is damaged, of another template, or was written with another key.
    """
    with contextlib.ExitStack() as opened:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        opened.callback(os.close, descriptor)
        head = os.pread(descriptor, HEADER_BYTES, 0)
        if len(head) != HEADER_BYTES or not head.startswith(_MAGIC):
            raise IntegrityError(f"{path}: is not a delta")
        header = head[len(_MAGIC) + _CODE_BYTES :]
        found, is_full, changed_bytes, size, disk_digest = _HEADER.unpack(header)
        about = os.fstat(descriptor)
        if about.st_size != HEADER_BYTES + size:
            raise IntegrityError(f"{path}: is truncated, or longer than it was")
        said = head[len(_MAGIC) :][:_CODE_BYTES]
        if verified is None or not verified.is_verified(about, said):
            code = blake3(header, key=key)
            for part in _parts(descriptor, HEADER_BYTES, size):
                code.update(part)
            if not hmac.compare_digest(code.digest(), said):
                raise IntegrityError(f"{path}: was not written by this host")
            if verified is not None:
                verified.add(about, said)
        if found != bytes.fromhex(template):
            raise IntegrityError(f"{path}: is of template {found.hex()}, not {template}")
        disk_file = _load_disk(path.parent, disk_digest, verified)
        opened.pop_all()
    return VmDelta(
        template=template,
        is_full=is_full,
        stream=descriptor,
        offset=HEADER_BYTES,
        changed_bytes=changed_bytes,
        digest=said.hex(),
        disk=disk_file,
    )


def _identity(about: os.stat_result) -> tuple[int, ...]:
    # Without the time of its links: a fork makes one.
    return (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)


def digest(path: Path) -> str:
    """Read the code that a file claims, in hexadecimal; load() verifies it."""
    return _head(path)[len(_MAGIC) :][:_CODE_BYTES].hex()


def disk_digest(path: Path) -> bytes:
    """Read the digest of the disk that belongs to a delta, as the file claims it."""
    return _head(path)[len(_MAGIC) + _CODE_BYTES + _DISK_OFFSET :]


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEADER_BYTES)


def _load_disk(folder: Path, wanted: bytes, verified: VerifiedFiles | None) -> int:
    """Open and verify the disk of a delta.

    Raises:
        IntegrityError: it is missing or damaged.
    """
    descriptor = disk.open_kept(folder, wanted)
    try:
        about = os.fstat(descriptor)
        if verified is None or not verified.is_verified(about, wanted):
            disk.check(descriptor, wanted)
            if verified is not None:
                verified.add(about, wanted)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _parts(descriptor: int, offset: int, size: int) -> Iterator[bytes]:
    """Iterate over the bytes of a file from an offset on.

    Raises:
        IntegrityError: there are fewer.
    """
    position = offset
    while position < offset + size:
        part = os.pread(descriptor, min(_PART_BYTES, offset + size - position), position)
        if not part:
            raise IntegrityError("the delta was truncated while it was read")
        yield part
        position += len(part)
