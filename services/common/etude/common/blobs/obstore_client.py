"""A folder or bucket through obstore's synchronous API."""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.store import ObjectStore, S3Store
from typing_extensions import Buffer, override

from etude.common.blobs.error_translation import ConflictError, LostUploadError, translate_errors
from etude.common.blobs.retry_policy import pause_s
from etude.common.blobs.store import (
    MissingError,
    ObjectInfo,
    Store,
    checked_create,
    checked_key,
    checked_range,
    exact,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta

PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
CONFLICTS_AT_MOST = 5
"""Each needs a delete of the key within one round trip: five in a row are no accident."""


@dataclass(slots=True)
class ObstoreStore(Store):
    """Retries and time limits are the clients'; see `opening`."""

    url: str
    store: ObjectStore
    once: ObjectStore
    """The same place through a client that does not retry."""
    parts_above: int | None = None
    """Bytes that are put in one request; above, parts of PART_BYTES that are sent again one by one.

    None where a put is no request: a folder takes a third of the processor time in one piece.
    """

    @override
    def get(self, key: str) -> bytes:
        with translate_errors(self._where(key)):
            return bytes(obstore.get(self.store, checked_key(key)).bytes())

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self._range(self.store, key, start, length))

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        return self._range(self.once, key, start, length)

    @override
    def put(self, key: str, data: Buffer) -> None:
        content = memoryview(data).cast("B")
        try:
            self._put_once(key, content)
        except LostUploadError:  # it may be there, but only a reply would say so
            self._put_once(key, content)

    def _put_once(self, key: str, content: memoryview) -> None:
        with translate_errors(self._where(key)):
            obstore.put(
                self.store,
                checked_key(key),
                content,
                use_multipart=self.parts_above is not None and content.nbytes > self.parts_above,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )

    @override
    def create(self, key: str, data: bytes) -> None:
        checked_create(data)
        for conflicts in range(CONFLICTS_AT_MOST):
            try:
                with translate_errors(self._where(key)):
                    obstore.put(self.store, checked_key(key), data, mode="create")
            except ConflictError:
                if conflicts + 1 == CONFLICTS_AT_MOST:
                    raise
                time.sleep(pause_s(conflicts + 1, random.random()))  # noqa: S311 - jitter
            else:
                return

    @override
    def head(self, key: str) -> ObjectInfo | None:
        try:
            with translate_errors(self._where(key)):
                return _info(obstore.head(self.store, checked_key(key)))
        except MissingError:
            return None

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = []
        with translate_errors(self._where(prefix)):
            # obstore matches whole path segments, and a folder lists in any order.
            folder = prefix.rpartition("/")[0] or None
            for page in obstore.list(self.store, folder, offset=after or None):
                found += map(_info, page)
        yield from sorted(o for o in found if o.key.startswith(prefix) and o.key > after)

    @override
    def list_folders(self, prefix: str) -> Sequence[str]:
        with translate_errors(self._where(prefix)):
            found = obstore.list_with_delimiter(self.store, prefix.rstrip("/"))
        return sorted(name.removeprefix(prefix) for name in found["common_prefixes"])

    @override
    def delete(self, keys: Sequence[str]) -> None:
        wanted = [checked_key(key) for key in keys]
        try:
            self._delete(wanted)  # a bucket takes a thousand in one request
        except MissingError:  # a folder stops at the first that is not there
            for key in wanted:
                with contextlib.suppress(MissingError):
                    self._delete([key])

    def sign_reads(self, keys: Sequence[str], *, lifetime_s: int) -> Sequence[str]:
        """URLs that read one object of a bucket each, for as long as given, without credentials.

        Raises:
            StoreError: there are no credentials to sign with.
        """
        assert isinstance(self.store, S3Store), self.url  # noqa: S101 - open_bucket() made it
        if not keys:
            return []
        wanted = [checked_key(key) for key in keys]
        with translate_errors(self._where(keys[0])):
            return obstore.sign(self.store, "GET", wanted, timedelta(seconds=lifetime_s))

    def _delete(self, keys: Sequence[str]) -> None:
        if keys:
            with translate_errors(
                self._where(keys[0] if len(keys) == 1 else f"({len(keys)} keys)")
            ):
                obstore.delete(self.store, keys)

    def _range(self, client: ObjectStore, key: str, start: int, length: int) -> memoryview:
        checked_range(start, length)
        checked_key(key)
        if not length:  # no request can ask for nothing
            return memoryview(b"")
        with translate_errors(self._where(key)):
            data = obstore.get_range(client, key, start=start, length=length)
        return exact(memoryview(data), length, self._where(key))

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


def _info(meta: "ObjectMeta") -> ObjectInfo:
    changed = meta["last_modified"]
    # Listings carry milliseconds on some stores, heads never do.
    return ObjectInfo(
        meta["path"], meta["size"], meta["e_tag"] or str(changed), float(int(changed.timestamp()))
    )
