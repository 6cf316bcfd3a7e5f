"""OCI image layouts, honest and not, written byte by byte."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import zstandard

Member = tuple[tarfile.TarInfo, bytes]


def file(name: str, content: bytes = b"x", *, mode: int = 0o644) -> Member:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    return member, content


def folder(name: str) -> Member:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    return member, b""


def link(name: str, target: str, *, is_hard: bool = False) -> Member:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.LNKTYPE if is_hard else tarfile.SYMTYPE, target
    return member, b""


def device(name: str) -> Member:
    """The machine's memory."""
    member = tarfile.TarInfo(name)
    member.type, member.devmajor, member.devminor, member.mode = tarfile.CHRTYPE, 1, 1, 0o666
    return member, b""


def removed(name: str) -> Member:
    parent, _, leaf = name.rpartition("/")
    return file(f"{parent}/.wh.{leaf}".lstrip("/"), b"")


def add_blob(layout: Path, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    place = layout / "blobs/sha256" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return f"sha256:{name}"


class Layer(NamedTuple):
    """A layer in a layout."""

    described: Mapping[str, object]
    """As manifests name it."""
    diff_id: str


def add_layer(layout: Path, members: Iterable[Member], *, is_zstd: bool = False) -> Layer:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    raw = packed.getvalue()
    data = zstandard.compress(raw) if is_zstd else gzip.compress(raw, 1, mtime=0)
    kind = f"application/vnd.oci.image.layer.v1.tar+{'zstd' if is_zstd else 'gzip'}"
    described = {"mediaType": kind, "digest": add_blob(layout, data), "size": len(data)}
    return Layer(described, f"sha256:{hashlib.sha256(raw).hexdigest()}")


def write_layout(
    layout: Path,
    *layers: Iterable[Member],
    config: Mapping[str, object] | None = None,
    is_zstd: bool = False,
) -> str:
    """Write an image with these layers; returns the digest of its manifest."""
    added = [add_layer(layout, members, is_zstd=is_zstd) for members in layers]
    return write_image(layout, added, config or {})


def write_image(layout: Path, layers: Sequence[Layer], config: Mapping[str, object]) -> str:
    """Write an image of layers that are here; returns the digest of its manifest."""
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [each.diff_id for each in layers]},
    }
    text = json.dumps(settings).encode()
    kind = "application/vnd.oci.image.config.v1+json"
    listed = {"mediaType": kind, "digest": add_blob(layout, text), "size": len(text)}
    return write_manifest(layout, listed, [each.described for each in layers])


def write_manifest(
    layout: Path, config: Mapping[str, object], layers: Iterable[Mapping[str, object]]
) -> str:
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": list(layers)}
    return add_blob(layout, json.dumps(manifest).encode())
