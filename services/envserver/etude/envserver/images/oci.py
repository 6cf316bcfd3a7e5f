"""A root file system from an OCI image layout: https://github.com/opencontainers/image-spec."""

import contextlib
import gzip
import hashlib
import json
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import zstandard

from etude.common.errors import Problem, UserError

_MAX_MANIFEST_BYTES = 4 << 20
"""Limit of the distribution specification on manifests."""
_MAX_LAYERS = 512
_MAX_BYTES = 64 << 30
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_IMAGE_MANIFESTS = {
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
}


def unpack_layout(layout: Path, digest: str, tree: Path) -> None:
    """Fill a folder with the layers of one manifest, each checked against its digest.

    Raises:
        UserError: the layout lacks something, or holds what does not belong into a root.
    """
    manifest = _manifest(layout, digest)
    layers = manifest.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= _MAX_LAYERS:
        raise UserError(_bad(layout, f"{digest}: layers: is not a list of 1 to {_MAX_LAYERS}"))
    left = _MAX_BYTES
    for number, layer in enumerate(layers):
        match layer:
            case {"digest": str(name), "mediaType": str(kind)}:
                left -= _apply_layer(_blob(layout, name), kind, tree, left)
            case _:
                raise UserError(
                    _bad(layout, f"{digest}: layers.{number}: lacks digest or mediaType")
                )


def _manifest(layout: Path, digest: str) -> Mapping[str, Any]:
    path = _blob(layout, digest)
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise UserError(_bad(layout, f"{digest}: is longer than {_MAX_MANIFEST_BYTES} bytes"))
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as cause:
        raise UserError(_bad(layout, f"{digest}: is not JSON: {cause}")) from cause
    if not isinstance(found, dict) or found.get("mediaType") not in _IMAGE_MANIFESTS:
        raise UserError(
            _bad(layout, f"{digest}: is not an image manifest; name the one of linux/amd64")
        )
    return found


def _blob(layout: Path, digest: str) -> Path:
    if not _DIGEST.fullmatch(digest):
        raise UserError(_bad(layout, f"{digest[:80]!r} is not a sha256 digest"))
    path = layout / "blobs" / "sha256" / digest.removeprefix("sha256:")
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as cause:
        raise UserError(_bad(layout, f"{digest}: {cause.strerror}")) from cause
    if f"sha256:{found}" != digest:
        raise UserError(_bad(layout, f"{digest}: the blob's content has the digest sha256:{found}"))
    return path


def _apply_layer(blob: Path, kind: str, tree: Path, limit_bytes: int) -> int:
    """Apply one layer to the tree; returns its size in bytes.

    Raises:
        UserError: it is damaged, larger than allowed, or leaves the tree.
    """
    size = 0
    try:
        with _open_layer(blob, kind) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                size += member.size
                if size > limit_bytes:
                    raise UserError(_bad(blob, f"unpacks to more than {_MAX_BYTES} bytes"))
                _take(archive, member, tree)
    except (tarfile.TarError, OSError, EOFError, zstandard.ZstdError) as cause:
        raise UserError(_bad(blob, f"cannot be unpacked: {cause}")) from cause
    return size


@contextlib.contextmanager
def _open_layer(blob: Path, kind: str) -> Iterator[IO[bytes]]:
    with contextlib.ExitStack() as stack:
        stream: IO[bytes] = stack.enter_context(blob.open("rb"))
        if kind.endswith("+zstd"):
            stream = stack.enter_context(zstandard.ZstdDecompressor().stream_reader(stream))
        elif kind.endswith(("+gzip", ".gzip")):
            stream = cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=stream)))
        yield stream


def _take(archive: tarfile.TarFile, member: tarfile.TarInfo, tree: Path) -> None:
    path = PurePosixPath(member.name.lstrip("/"))
    if ".." in path.parts:
        raise UserError(_bad(tree, f"{member.name!r} leaves the root"))
    if path.name.startswith(_WHITEOUT):
        _remove(_real_parent(tree, path), path.name)
        return
    if member.ischr() or member.isblk():
        return  # the guest has a /dev of its own
    parent = _real_parent(tree, path)
    target = parent / path.name
    if target.is_symlink() or (target.exists() and not (target.is_dir() and member.isdir())):
        _delete(target)
    if member.islnk():
        _link(tree, PurePosixPath(member.linkname.lstrip("/")), target)
        return
    # The "tar" filter refuses members outside of the folder.
    archive.extract(member, tree, numeric_owner=True, filter=_owned)


def _link(tree: Path, name: PurePosixPath, target: Path) -> None:
    """Give a file of the tree a second name.

    Raises:
        UserError: there is no such file in the tree.
    """
    source = _real_parent(tree, name) / name.name
    # Owner and mode of what a link leads to would be changed, wherever that is.
    if ".." in name.parts or source.is_symlink() or not source.is_file():
        raise UserError(_bad(tree, f"{str(name)!r} leaves the root, or is no file of it"))
    target.hardlink_to(source)


def _owned(member: tarfile.TarInfo, tree: str) -> tarfile.TarInfo:
    """The standard filter that keeps members inside, with the owner and all mode bits kept."""
    safe = tarfile.tar_filter(member.replace(mode=member.mode & 0o755), tree)
    return safe.replace(mode=member.mode & 0o7777, uid=member.uid, gid=member.gid, deep=False)


def _real_parent(tree: Path, path: PurePosixPath) -> Path:
    """The folder that a member belongs to; a link in an image may lead elsewhere in it only.

    Raises:
        UserError: a link leads out.
    """
    parent = (tree / path.parent).resolve()
    if not parent.is_relative_to(tree.resolve()):
        raise UserError(_bad(tree, f"{str(path)!r} leads through a link out of the root"))
    return parent


def _remove(folder: Path, name: str) -> None:
    if name == _OPAQUE:
        for each in folder.iterdir() if folder.is_dir() else ():
            _delete(each)
        return
    _delete(folder / name.removeprefix(_WHITEOUT))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _bad(where: Path, what: str) -> Problem:
    fix = "export the image again, for example: skopeo copy docker://IMAGE oci:FOLDER"
    return Problem("InvalidSpec", what, str(where), fix)
