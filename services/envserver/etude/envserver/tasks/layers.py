"""Layers of a fetched image, read one after the other without unpacking.

Covered: names that leave the root, archives larger than they say, headers that fill the memory,
too many files. Links are not followed: what they lead to is read where it lies.

Source: https://github.com/opencontainers/image-spec/blob/main/layer.md
"""

import contextlib
import gzip
import posixpath
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, Self, cast

from typing_extensions import override

from etude.common.pinned_images import InvalidImageError
from etude.envserver.images.pull import image_layout

_MAX_HEADER_BYTES = 1 << 20
"""Of a header that holds a long name or attributes."""
_GZIP = b"\x1f\x8b"
_REMOVED = ".wh."
_OPAQUE = ".wh..wh..opq"
_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class DamagedLayerError(InvalidImageError):
    """A layer that cannot be read, or is larger than it may be."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what, "build the image again, or name another one")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLimits:
    """Limits on all layers of an image together."""

    max_bytes: int = 64 << 30
    """Of the unpacked files."""
    max_entries: int = 2_000_000


class LayerEntry(NamedTuple):
    """A file of a layer, or the mark that removes one of an earlier layer."""

    layer: str
    """Number and digest, for people."""
    path: str
    """From the root, without its first slash."""
    size: int
    file: IO[bytes] | None
    """The content, to be read before the next entry is taken; None for a mark."""


@dataclass(slots=True)
class LayerMarks:
    """Marks of one layer: what it removes of the layers below it."""

    layer: str = ""
    paths: set[str] = field(default_factory=set)

    def covers(self, path: str, layer: str) -> bool:
        """True if a file of another layer is removed, or a folder that it is in."""
        if layer == self.layer:
            return False
        parts = path.split("/")
        return "" in self.paths or any(
            "/".join(parts[:end]) in self.paths for end in range(1, len(parts) + 1)
        )


class _Header(tarfile.TarInfo):
    """A header of an archive that is not trusted."""

    @classmethod
    @override
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read a header.

        Raises:
            DamagedLayerError: what follows it would fill the memory.
        """
        found = super().frombuf(buf, encoding, errors)
        if found.type in _HEADERS and found.size > _MAX_HEADER_BYTES:
            raise DamagedLayerError("a layer", f"has a header of {found.size} bytes")
        return found


def read_layers(layout: Path, limits: LayerLimits | None = None) -> Iterator[LayerEntry]:
    """The files of all layers, from the lowest layer on, in the order of their archives.

    Raises:
        DamagedLayerError: a layer is damaged, or exceeds a limit.
    """
    limits = limits or LayerLimits()
    num_bytes = num_entries = 0
    _, *digests = image_layout.image_parts(layout)
    for number, digest in enumerate(digests, 1):
        layer = f"layer {number} of {len(digests)} ({digest[:19]})"
        with refuse_damage(layer):
            for entry in _read_layer(layout / "blobs/sha256" / digest.partition(":")[2], layer):
                num_entries += 1  # also of folders and links: a million of them take time too
                num_bytes += entry.size if entry is not None else 0
                if num_entries > limits.max_entries or num_bytes > limits.max_bytes:
                    what = f"holds more than {limits.max_entries} files or {limits.max_bytes} bytes"
                    raise DamagedLayerError(layer, f"{what} with those below it")
                if entry is not None:
                    yield entry


@contextlib.contextmanager
def refuse_damage(layer: str) -> Iterator[None]:
    """Name the layer in errors of the block, which reads or copies a file of it.

    Raises:
        DamagedLayerError: the file ends early, or has a name that no file can have.
    """
    try:
        yield
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as cause:
        raise DamagedLayerError(layer, f"cannot be read: {cause}") from cause


def _read_layer(blob: Path, layer: str) -> Iterator[LayerEntry | None]:
    """The entries of one layer; None for folders, links and devices."""
    with blob.open("rb") as packed:
        is_packed = packed.read(2) == _GZIP
        packed.seek(0)
        # tarfile itself reads the first of several gzip streams only.
        raw = cast("IO[bytes]", gzip.GzipFile(fileobj=packed)) if is_packed else packed
        with tarfile.open(fileobj=raw, mode="r|", tarinfo=_Header) as archive:
            for member in archive:
                yield _entry(archive, member, layer)
                archive.members = []  # type: ignore[attr-defined] # it would keep all of them


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo, layer: str) -> LayerEntry | None:
    """An entry of an archive.

    Raises:
        DamagedLayerError: its name leaves the root.
    """
    if ".." in member.name.split("/"):
        raise DamagedLayerError(layer, f"has the path {member.name[:200]!r}")
    path = posixpath.normpath(f"/{member.name}").lstrip("/")
    folder, name = posixpath.split(path)
    if name == _OPAQUE:
        return LayerEntry(layer, folder, 0, None)
    if name.startswith(_REMOVED):
        return LayerEntry(layer, posixpath.join(folder, name.removeprefix(_REMOVED)), 0, None)
    if not member.isreg():
        return None
    return LayerEntry(layer, path, member.size, archive.extractfile(member))
