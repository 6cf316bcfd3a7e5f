"""Protocol of object stores, and their errors."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from typing_extensions import Buffer

from etude.common.errors import EtudeError, InvalidFieldError, StoreError

MAX_CREATE_BYTES = 16 << 20
"""A create is one request, which is sent again as a whole when it fails."""


class MissingError(EtudeError, FileNotFoundError):
    """No object has this key: an answer, not a failure of the store."""

    reason = "NotFound"


class ExistsError(EtudeError):
    """An object has this key already: an answer, not a failure of the store.

    It may be our own: a create whose reply was lost is sent again by the client.
    """

    reason = "AlreadyExists"


class StoreRefusedError(StoreError):
    """The store refused the call; the same call would be refused again."""


class DeniedError(StoreRefusedError):
    """The credentials are absent, unknown or not enough; of a folder, this user's rights."""


class NoBucketError(StoreRefusedError):
    """The bucket does not exist."""


class ShortReadError(StoreRefusedError):
    """The object ends before the range does."""


def is_unavailable(error: BaseException) -> bool:
    """Return true if a store gave no answer, and may give one later."""
    return isinstance(error, StoreError) and not isinstance(error, StoreRefusedError)


class ObjectInfo(NamedTuple):
    """One object of a listing."""

    key: str
    size: int
    tag: str = ""
    """Changes whenever the content does; empty where it is not needed."""
    modified_s: float = 0.0
    """Last change in whole seconds since the epoch by the store's clock; 0 where unknown.

    To tell old from new with a margin, never to order two objects: HTTP carries no fractions.
    """


class Store(Protocol):
    """Keys are relative to the store's prefix; every method is safe to call from threads.

    Every call ends: a bucket's after its time limits and a bounded number of retries.

    Raises:
        MissingError: by get and get_range, where no object has the key.
        ExistsError: by create, where an object has the key.
        InvalidFieldError: the key could leave the store's prefix.
        StoreRefusedError: the same call would fail again.
        StoreError: the store is away, slow or broken; the call may be repeated.
    """

    url: str

    def get(self, key: str) -> bytes:
        """The whole object."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`; fewer are an error."""
        ...

    def view(self, key: str, start: int, length: int) -> memoryview:
        """As get_range, but one attempt without retries, and without a copy where possible.

        For callers that run many reads concurrently and decide themselves what to repeat.
        """
        return memoryview(self.get_range(key, start, length))

    def put(self, key: str, data: Buffer) -> None:
        """Write or overwrite; readers see the old object or the new one, never a part."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Write only if no object has the key; at most MAX_CREATE_BYTES."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Size, tag and time of an object, or None if there is none."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys start with the prefix and come after a key, sorted by key."""
        ...

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Parts of keys between a prefix that ends with a slash and the next slash, sorted.

        A bucket and a folder answer without looking at the objects in them. A folder also names
        those that are empty.
        """
        behind = (info.key.removeprefix(prefix) for info in self.list(prefix))
        return sorted({key.partition("/")[0] for key in behind if "/" in key})

    def delete(self, keys: Sequence[str]) -> None:
        """Delete each; a key without object is success."""
        ...


def checked_key(key: str) -> str:
    """The key, if it is a plain path below the store's prefix.

    Raises:
        InvalidFieldError: it is empty, absolute, has control characters or segments that some
            store would resolve.
    """
    if not key.isprintable() or any(part in {"", ".", ".."} for part in key.split("/")):
        raise InvalidFieldError("key", f"{key!r} is no plain relative path")
    return key


def checked_range(start: int, length: int) -> None:
    """Refuse a range that no object can have.

    Raises:
        InvalidFieldError: start or length is negative.
    """
    if start < 0 or length < 0:
        raise InvalidFieldError("range", f"{length} bytes from {start}")


def checked_create(data: Buffer) -> None:
    """Refuse content that a store could not create in one request.

    Raises:
        InvalidFieldError: it is larger than MAX_CREATE_BYTES.
    """
    size = memoryview(data).nbytes
    if size > MAX_CREATE_BYTES:
        raise InvalidFieldError(
            "data", f"create of {size} bytes exceeds {MAX_CREATE_BYTES}: use put"
        )


def exact(data: memoryview, length: int, where: str) -> memoryview:
    """Data, if a range came back whole: stores cut one that passes the end, without an error.

    Raises:
        ShortReadError: it did not.
    """
    if len(data) != length:
        raise ShortReadError(f"{where}: asked for {length} bytes, got {len(data)}")
    return data
