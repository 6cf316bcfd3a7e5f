"""Images through a store: pushed under the digest of what they are, fetched only if they are it."""

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
from etude.envserver.images.build_cache import Cache
from etude.envserver.images.built_image import FILES, MANIFEST, MAX_MANIFEST_BYTES, UPPER, Image

KIND = "fetched"
"""Folder of fetched images in the cache."""
_REFERENCE = re.compile(r"[0-9a-f]{32}")
_CHUNK_BYTES = 16 << 20
_MAX_FILE_BYTES = 64 << 30
_KNOWN = frozenset({*FILES, UPPER})


def reference(image: Image) -> str:
    """What an image is called in a store: 32 digits of the SHA-256 of its manifest.

    The manifest has the SHA-256 of every file, so whoever knows the name knows the content.
    """
    return _digest((image.folder / MANIFEST).read_bytes())


def is_reference(name: str) -> bool:
    """Whether an image can be called so in a store."""
    return _REFERENCE.fullmatch(name) is not None


def push(image: Image, store: Store, say: Callable[[str], None]) -> str:
    """Put an image under its reference; what is there already stays. Returns the reference.

    The manifest comes last: an image that was cut off is none.

    Raises:
        StoreError: the store failed.
    """
    name = reference(image)
    for file in image.files:
        key = f"{name}/{file}"
        size = (image.folder / file).stat().st_size
        found = store.head(key)
        if found is None or found.size != size:
            say(f"{file}: {size >> 20} MiB …")
            _put(store, key, image.folder / file)
    store.put(f"{name}/{MANIFEST}", (image.folder / MANIFEST).read_bytes())
    return name


def fetch(name: str, store: Store, cache: Cache) -> Image:
    """The image of a reference, from the cache or from the store.

    Raises:
        CorruptError: the store holds something else under this name, or not all of it.
        StoreError: the store failed.
    """
    return built_image.read(cache.entry(KIND, name, functools.partial(_fill, name, store)))


def _fill(name: str, store: Store, folder: Path) -> None:
    try:
        manifest = _manifest(name, store)
        for file, digest in manifest.items():
            _get(store, f"{name}/{file}", folder / file, digest)
    except MissingError as error:
        raise CorruptError(f"{store.url}/{name} lacks a part: {error}") from error


def _manifest(name: str, store: Store) -> dict[str, str]:
    """The files of an image and their digests; the manifest itself is one of them.

    Raises:
        CorruptError: it is not there, or not what it says.
    """
    key = f"{name}/{MANIFEST}"
    info = store.head(key)
    if info is None or info.size > MAX_MANIFEST_BYTES:
        raise CorruptError(f"{store.url}/{key} is no manifest of an image")
    data = store.get(key)
    if _digest(data) != name:
        raise CorruptError(f"{store.url}/{key} is not what its name says")
    # The digest tells that it is the one that was asked for, not that its maker meant well.
    match json.loads(data):
        case {"files": dict(files)} if set(FILES) <= set(files) <= _KNOWN:
            return {**files, MANIFEST: hashlib.sha256(data).hexdigest()}
        case _:
            raise CorruptError(f"{store.url}/{key} is no manifest of an image")


def _get(store: Store, key: str, path: Path, digest: str) -> None:
    """Copy one object to a file.

    Raises:
        CorruptError: its content has another digest.
    """
    info = store.head(key)
    size = info.size if info is not None else 0
    if size > _MAX_FILE_BYTES:
        raise CorruptError(f"{store.url}/{key} has {size} bytes")
    found = hashlib.sha256()
    with path.open("wb") as file:
        for start in range(0, size, _CHUNK_BYTES):
            part = store.get_range(key, start, min(_CHUNK_BYTES, size - start))
            found.update(part)
            file.write(part)
    if found.hexdigest() != digest:
        raise CorruptError(f"{store.url}/{key} is damaged: push the image again")
    # The machines run as another user.
    path.chmod(0o644)


def _put(store: Store, key: str, path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        store.put(key, content)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
