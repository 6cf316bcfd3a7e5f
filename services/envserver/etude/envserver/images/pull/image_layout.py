"""OCI image layouts of one image, fetched by its digest from a registry or a store of layouts.

Source: https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.common.blobs import Store
from etude.common.blobs.store import MissingError
from etude.common.errors import CorruptError, StoreError
from etude.common.pinned_images import InvalidImageError, PinnedImage
from etude.envserver.images import image_store
from etude.envserver.images.pull.bounded_program import FillLimits, fill_folder
from etude.envserver.images.pull.registry_access import RegistryAccess
from etude.envserver.storage.store_reads import StoreReads

TAG = "image"
"""Name of the only image in a fetched layout."""
_MAX_MANIFEST_BYTES = 4 << 20
"""Limit of the distribution specification on manifests."""
_MAX_LAYERS = 512
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_FIX = "write the image again, for example: skopeo copy docker://IMAGE oci:FOLDER:NAME"
_PLATFORM = ("--override-os", "linux", "--override-arch", "amd64")


class InvalidLayoutError(InvalidImageError):
    """An OCI image layout that lacks a part, or has another one than it says."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what, _FIX)


def fetch_layout(
    image: PinnedImage,
    folder: Path,
    *,
    registries: RegistryAccess,
    reads: StoreReads,
    limits: FillLimits,
) -> Path:
    """Fetch an image, each part checked against its digest; returns its layout.

    Args:
        image: what to fetch.
        folder: an empty folder.
        registries: access to registries.
        reads: of layouts.
        limits: on the compressed image.

    Raises:
        UserError: it is not there, is not what its digest says, or exceeds a limit.
    """
    layout = folder / "layout"
    layout.mkdir()
    source = f"docker://{image}"
    if image.is_layout:
        _copy_blobs(image, folder / "source", reads, limits)
        source = f"oci:{folder / 'source'}:{TAG}"
    words = ["skopeo", "--insecure-policy", *_PLATFORM, "copy", "--quiet"]
    words += registries.skopeo_options("--src-authfile")
    # umoci reads no zstd: such layers are compressed again.
    words += ["--dest-compress-format", "gzip", source, f"oci:{layout}:{TAG}"]
    env = registries.program_environment(folder)
    fill_folder(words, folder, what=f"pull {image}", limits=limits, env=env)
    return layout


def image_config(layout: Path) -> Mapping[str, Any]:
    """The configuration of the image in a fetched layout: environment, working folder and so on.

    Raises:
        InvalidLayoutError: the image has none.
    """
    manifest = _only_manifest(layout)
    config = manifest.get("config")
    if not isinstance(config, dict):
        raise InvalidLayoutError(str(layout), "its manifest names no configuration")
    found = _read_json(_blob(layout, config.get("digest")), str(layout)).get("config") or {}
    if not isinstance(found, dict):
        raise InvalidLayoutError(str(layout), "its configuration is no object")
    return found


def image_parts(layout: Path) -> list[str]:
    """Digests of the configuration and the layers of the image in a layout of one."""
    return list(_parts(str(layout), _only_manifest(layout)))


def _only_manifest(layout: Path) -> Mapping[str, Any]:
    (listed,) = _read_json(layout / "index.json", str(layout))["manifests"]
    return _read_json(_blob(layout, listed["digest"]), str(layout))


def _copy_blobs(image: PinnedImage, target: Path, reads: StoreReads, limits: FillLimits) -> None:
    """Copy the blobs of one image from a layout of many, and list it alone.

    Raises:
        InvalidLayoutError: a blob is missing, damaged, or no part of an image for linux/amd64.
    """
    (target / "blobs/sha256").mkdir(parents=True)
    try:
        source = reads.open(image.source)
        digest, manifest = _platform_manifest(image, source, target)
        left = limits.max_bytes
        for part in _parts(str(image), manifest):
            left -= _copy_blob(source, target, part, left)
    except MissingError as cause:
        raise InvalidLayoutError(str(image), f"the layout lacks a part: {cause}") from cause
    except (StoreError, CorruptError) as cause:
        raise InvalidLayoutError(str(image), str(cause)) from cause
    listed = {
        "mediaType": _MANIFEST,
        "digest": digest,
        "size": _blob(target, digest).stat().st_size,
        "annotations": {"org.opencontainers.image.ref.name": TAG},
    }
    (target / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}', encoding="ascii")
    index = {"schemaVersion": 2, "manifests": [listed]}
    (target / "index.json").write_text(json.dumps(index), encoding="utf-8")


def _platform_manifest(
    image: PinnedImage, source: Store, target: Path
) -> tuple[str, Mapping[str, Any]]:
    """Digest and content of the image's manifest for linux/amd64.

    Raises:
        InvalidLayoutError: there is none.
    """
    _copy_blob(source, target, image.digest, _MAX_MANIFEST_BYTES)
    found = _read_json(_blob(target, image.digest), str(image))
    listed = found.get("manifests")
    if not isinstance(listed, list):
        return image.digest, found
    for each in listed:
        match each:
            case {
                "digest": str(digest),
                "platform": {"os": "linux", "architecture": "amd64"},
            }:
                _copy_blob(source, target, digest, _MAX_MANIFEST_BYTES)
                return digest, _read_json(_blob(target, digest), str(image))
            case _:
                continue
    raise InvalidLayoutError(str(image), "its index lists no image for linux/amd64")


def _parts(where: str, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Digests of the configuration and the layers.

    Raises:
        InvalidLayoutError: the manifest is not an image's.
    """
    layers = manifest.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= _MAX_LAYERS:
        raise InvalidLayoutError(where, f"its layers are not a list of 1 to {_MAX_LAYERS}")
    for number, part in enumerate([manifest.get("config"), *layers]):
        match part:
            case {"digest": str(digest)}:
                yield digest
            case _:
                raise InvalidLayoutError(where, f"part {number} of its manifest has no digest")


def _copy_blob(source: Store, target: Path, digest: str, max_bytes: int) -> int:
    """Copy one blob; returns its size.

    Raises:
        InvalidLayoutError: it is larger than allowed.
    """
    path = _blob(target, digest)
    key = f"blobs/sha256/{path.name}"
    info = source.head(key)
    if info is not None and info.size > max_bytes:
        raise InvalidLayoutError(digest, f"has {info.size} bytes, more than {max_bytes}")
    image_store.download_file(source, key, path, path.name)
    return path.stat().st_size


def _blob(layout: Path, digest: object) -> Path:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidLayoutError(str(layout), f"{str(digest)[:80]!r} is not a sha256 digest")
    return layout / "blobs/sha256" / digest.removeprefix("sha256:")


def _read_json(path: Path, where: str) -> Mapping[str, Any]:
    """Read an object of a fetched layout.

    Raises:
        InvalidLayoutError: it is not one, or too long.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_MANIFEST_BYTES + 1)
        found = json.loads(data) if len(data) <= _MAX_MANIFEST_BYTES else None
    except (OSError, ValueError, RecursionError) as cause:
        raise InvalidLayoutError(where, f"a part is not JSON: {cause}") from cause
    if not isinstance(found, dict):
        raise InvalidLayoutError(where, "a part is no JSON object, or too long")
    return found
