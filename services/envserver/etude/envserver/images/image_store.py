"""Images in an object store: pushed under their digest, verified when fetched."""

import functools
import hashlib
import json
import mmap
import re
from collections.abc import Callable
from pathlib import Path

from etude.common.blobs import Store
from etude.common.blobs.store import MissingError
from etude.common.errors import CorruptError
from etude.envserver.images import built_image
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import (
    FILES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    BuiltImage,
)

KIND = "fetched"
"""Folder of fetched images in the cache."""
_REFERENCE = re.compile(r"[0-9a-f]{32}")
_CHUNK_BYTES = 16 << 20
_MAX_FILE_BYTES = 64 << 30


def image_reference(image: BuiltImage) -> str:
    """Name of an image in a store: 32 digits of the SHA-256 of its manifest.

    The manifest has the SHA-256 of every file, so the name verifies the content.
    """
    return _digest((image.folder / MANIFEST).read_bytes())


def is_reference(name: str) -> bool:
    """True if this can be the name of an image in a store."""
    return _REFERENCE.fullmatch(name) is not None


def push_image(image: BuiltImage, store: Store, say: Callable[[str], None]) -> str:
    """Upload an image under its reference, skipping present files; returns the reference.

    The manifest comes last: without it there is no image.

    Raises:
        StoreError: the store failed.
    """
    name = image_reference(image)
    for file in image.files:
        key = f"{name}/{file}"
        size = (image.folder / file).stat().st_size
        found = store.head(key)
        if found is None or found.size != size:
            say(f"{file}: {size >> 20} MiB …")
            _upload_file(store, key, image.folder / file)
    store.put(f"{name}/{MANIFEST}", (image.folder / MANIFEST).read_bytes())
    return name


def fetch_image(name: str, store: Store, cache: BuildCache) -> BuiltImage:
    """Fetch the image of a reference from the store, unless it is cached.

    Raises:
        CorruptError: the store holds something else under this name, or only a part.
        StoreError: the store failed.
    """
    return built_image.read_image(cache.entry(KIND, name, functools.partial(_fill, name, store)))


def _fill(name: str, store: Store, folder: Path) -> None:
    try:
        manifest = _manifest(name, store)
        for file, digest in manifest.items():
            download_file(store, f"{name}/{file}", folder / file, digest)
    except MissingError as error:
        raise CorruptError(f"{store.url}/{name} lacks a part: {error}") from error


def _manifest(name: str, store: Store) -> dict[str, str]:
    """Read the files of an image and their digests, the manifest included.

    Raises:
        CorruptError: the manifest is missing, or has another digest.
    """
    key = f"{name}/{MANIFEST}"
    info = store.head(key)
    if info is None or info.size > MAX_MANIFEST_BYTES:
        raise CorruptError(f"{store.url}/{key} is not a manifest of an image")
    data = store.get(key)
    if _digest(data) != name:
        raise CorruptError(f"{store.url}/{key} does not have the digest in its name")
    # The digest proves that it is the requested one, not that its content is benign.
    match json.loads(data):
        case {"files": dict(files)} if set(files) == set(FILES):
            return {**files, MANIFEST: hashlib.sha256(data).hexdigest()}
        case _:
            raise CorruptError(f"{store.url}/{key} is not a manifest of an image")


def download_file(store: Store, key: str, path: Path, digest: str) -> None:
    """Copy one object to a file.

    Raises:
        CorruptError: it is missing, or its content has another digest.
    """
    info = store.head(key)
    if info is None or info.size > _MAX_FILE_BYTES:
        what = "is missing" if info is None else f"has {info.size} bytes"
        raise CorruptError(f"{store.url}/{key} {what}")
    size = info.size
    found = hashlib.sha256()
    with path.open("wb") as file:
        for start in range(0, size, _CHUNK_BYTES):
            part = store.get_range(key, start, min(_CHUNK_BYTES, size - start))
            found.update(part)
            file.write(part)
    if found.hexdigest() != digest:
        raise CorruptError(
            f"{store.url}/{key} does not have the digest that names it: push it again"
        )
    # VMs run as another user.
    path.chmod(0o644)


def _upload_file(store: Store, key: str, path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        store.put(key, content)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
