"""The object store: a folder or any S3, behind one small protocol."""

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import unquote, urlparse

import obstore
from blake3 import blake3
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PermissionDeniedError
from obstore.store import LocalStore, ObjectStore, S3Store
from typing_extensions import override

from etude.common.errors import EtudeError, Problem, StoreError, UserError

if TYPE_CHECKING:
    from obstore import ObjectMeta

MAX_CREATE_BYTES = 16 << 20


class MissingError(EtudeError, FileNotFoundError):
    """No object has this key."""

    reason = "NotFound"


class ExistsError(EtudeError):
    """An object has this key already."""

    reason = "AlreadyExists"


class ObjectInfo(NamedTuple):
    """One object of a listing."""

    key: str
    size: int
    tag: str = ""
    """Another one whenever the store has other content; empty where nobody asks."""


class Store(Protocol):
    """Keys are relative to the store's prefix; every method is safe to call from threads."""

    url: str

    def get(self, key: str) -> bytes: ...
    def get_range(self, key: str, start: int, length: int) -> bytes: ...
    def put(self, key: str, data: bytes) -> None: ...
    def create(self, key: str, data: bytes) -> None: ...
    def head(self, key: str) -> ObjectInfo | None: ...
    def list(self, prefix: str) -> Iterator[ObjectInfo]: ...
    def delete(self, keys: Sequence[str]) -> None: ...


@dataclass(slots=True)
class MemoryStore(Store):
    """Keeps objects in a dict, for tests; the contract suite runs on it too."""

    url: str = "memory://"
    objects: dict[str, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @override
    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise MissingError(f"{self.url}/{key}")
        return self.objects[key]

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return _exact(self.get(key)[start : start + length], length, f"{self.url}/{key}")

    @override
    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = bytes(data)

    @override
    def create(self, key: str, data: bytes) -> None:
        with self._lock:
            if key in self.objects:
                raise ExistsError(f"{self.url}/{key}")
            self.objects[key] = bytes(data)

    @override
    def head(self, key: str) -> ObjectInfo | None:
        return _described(key, self.objects[key]) if key in self.objects else None

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield _described(key, self.objects[key])

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)


@dataclass(slots=True)
class ObstoreStore(Store):
    """A folder or bucket through obstore's synchronous API."""

    url: str
    store: ObjectStore

    @override
    def get(self, key: str) -> bytes:
        with _translated(self.url, key):
            return bytes(obstore.get(self.store, key).bytes())

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        with _translated(self.url, key):
            data = bytes(obstore.get_range(self.store, key, start=start, length=length))
        # Stores answer a range past the end with fewer bytes and no error.
        return _exact(data, length, f"{self.url}/{key}")

    @override
    def put(self, key: str, data: bytes) -> None:
        with _translated(self.url, key):
            obstore.put(self.store, key, data)

    @override
    def create(self, key: str, data: bytes) -> None:
        if len(data) > MAX_CREATE_BYTES:
            raise ValueError(f"create of {len(data)} bytes exceeds {MAX_CREATE_BYTES}: use put")
        with _translated(self.url, key):
            obstore.put(self.store, key, data, mode="create")

    @override
    def head(self, key: str) -> ObjectInfo | None:
        try:
            with _translated(self.url, key):
                return _info(obstore.head(self.store, key))
        except MissingError:
            return None

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = []
        with _translated(self.url, prefix):
            # obstore matches whole path segments, and a folder lists in any order.
            for page in obstore.list(self.store, prefix.rpartition("/")[0] or None):
                found += map(_info, page)
        yield from sorted(o for o in found if o.key.startswith(prefix))

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                with _translated(self.url, key):
                    obstore.delete(self.store, key)
            except MissingError:
                continue


def _described(key: str, data: bytes) -> ObjectInfo:
    return ObjectInfo(key, len(data), blake3(data).hexdigest())


def _info(meta: "ObjectMeta") -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or str(meta["last_modified"]))


def _exact(data: bytes, length: int, where: str) -> bytes:
    if len(data) != length:
        raise StoreError(f"{where}: asked for {length} bytes, got {len(data)}")
    return data


class _translated:  # noqa: N801 - reads as a verb at the call
    """Gives obstore's errors our names, once."""

    def __init__(self, url: str, key: str) -> None:
        self._where = f"{url}/{key}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, EtudeError):
            return
        if isinstance(error, AlreadyExistsError):
            raise ExistsError(self._where) from error
        if isinstance(error, NotFoundError | FileNotFoundError):
            raise MissingError(self._where) from error
        if isinstance(error, PermissionDeniedError):
            raise StoreError(f"{self._where}: permission denied: {error}") from error
        if isinstance(error, BaseError | OSError):
            raise StoreError(f"{self._where}: {error}") from error


def open_store(url: str, *, endpoint: str | None = None, region: str | None = None) -> Store:
    """The store behind file:///folder or s3://bucket/prefix.

    S3 credentials come from the standard AWS_… environment variables.

    Raises:
        UserError: the URL names no store.
    """
    parts = urlparse(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        folder = Path(unquote(parts.path))
        folder.mkdir(parents=True, exist_ok=True)
        return ObstoreStore(url.rstrip("/"), LocalStore(folder, mkdir=True))
    if parts.scheme == "s3" and parts.netloc:
        options: Mapping[str, bool] = {"allow_http": (endpoint or "").startswith("http://")}
        store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config={"endpoint": endpoint} if endpoint else {},  # as a keyword, None is refused
            region=region or "us-east-1",
            client_options=dict(options),  # type: ignore[arg-type]
            virtual_hosted_style_request=False,
        )
        return ObstoreStore(url.rstrip("/"), store)
    raise UserError(
        Problem(
            reason="InvalidStorage",
            what=f"{url!r} names no object store",
            where="storage.uri",
            fix="use file:///absolute/folder or s3://bucket/prefix",
        )
    )


def probe(store: Store) -> None:
    """Refuse a store without the guarantees that publishing rests on.

    Raises:
        StoreError: naming the call that failed and what is needed.
    """
    key = f"probe/{uuid.uuid4().hex}"
    store.create(key, b"etude")
    try:
        store.create(key, b"etude")
    except ExistsError:
        pass
    else:
        raise StoreError(f"{store.url} overwrote an object on create: it needs conditional puts")
    if store.get_range(key, 1, 3) != b"tud" or key not in {o.key for o in store.list("probe/")}:
        raise StoreError(f"{store.url} does not read or list what was just written")
    store.delete([key])
    if store.head(key) is not None:
        raise StoreError(f"{store.url} still shows an object after its deletion")
