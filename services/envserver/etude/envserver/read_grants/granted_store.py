"""GrantedStore: reads of a prefix by URLs that a broker signed, without credentials."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import urllib3
from typing_extensions import Buffer, override
from urllib3.exceptions import HTTPError

from etude.common.blobs import DeniedError, MissingError, ObjectInfo, Store
from etude.common.blobs.store import checked_key, checked_range, exact
from etude.common.errors import StoreError
from etude.v1 import environments_pb2

Ask = Callable[[environments_pb2.GrantReadsRequest], environments_pb2.GrantReadsResponse]
"""Asks the pool's brokers for grants."""

MARGIN_S = 15.0
"""A grant that ends sooner is not used: the request has to reach the store before."""
RANGE_BYTES = 16 << 20
_LIMITS = urllib3.Timeout(connect=5, read=30)
_RETRIES = urllib3.Retry(
    4, redirect=0, backoff_factor=0.2, status_forcelist=(429, 500, 502, 503, 504)
)
"""The store that a broker signs for redirects nobody."""


class _Grant(NamedTuple):
    info: ObjectInfo
    url: str
    until_s: float


class _RefusedError(DeniedError):
    """The store refused a URL: it has ended, or the credentials behind it."""


@dataclass(slots=True)
class GrantedStore(Store):
    """One prefix, to read from. A grant is asked for as it is needed, and again when it ends."""

    url: str
    ask: Ask
    _grants: dict[str, _Grant] = field(default_factory=dict)
    _pool: urllib3.PoolManager = field(default_factory=urllib3.PoolManager)

    @override
    def get(self, key: str) -> bytes:
        info = self._find(key).info
        parts = (
            self.get_range(key, start, min(RANGE_BYTES, info.size - start))
            for start in range(0, info.size, RANGE_BYTES)
        )
        return b"".join(parts)

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        checked_range(start, length)
        grant = self._find(key)
        if not length:
            return b""
        try:
            return self._read(grant, start, length)
        except _RefusedError:
            self._grants.pop(key, None)
            return self._read(self._find(key), start, length)

    @override
    def head(self, key: str) -> ObjectInfo | None:
        try:
            return self._find(key).info
        except MissingError:
            return None

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        has_more = True
        while has_more:
            request = environments_pb2.GrantReadsRequest(uri=self.url, after=after)
            answer = self._ask(request)
            page = [each.key for each in answer.grants]
            has_more = answer.has_more and bool(page)
            for key in page:
                after = max(after, key)
                if key.startswith(prefix):
                    yield self._grants[key].info

    @override
    def put(self, key: str, data: Buffer) -> None:
        raise self._read_only()

    @override
    def create(self, key: str, data: bytes) -> None:
        raise self._read_only()

    @override
    def delete(self, keys: Sequence[str]) -> None:
        raise self._read_only()

    def _read_only(self) -> DeniedError:
        return DeniedError(f"{self.url}: grants are for reading alone")

    def _find(self, key: str) -> _Grant:
        """A grant that lasts long enough for a request.

        Raises:
            MissingError: no object has the key.
        """
        found = self._grants.get(checked_key(key))
        if found is None or time.monotonic() > found.until_s:
            self._grants.pop(key, None)
            self._ask(environments_pb2.GrantReadsRequest(uri=self.url, keys=[key]))
            found = self._grants.get(key)
        if found is None:
            raise MissingError(f"{self.url}/{key}")
        return found

    def _ask(
        self, request: environments_pb2.GrantReadsRequest
    ) -> environments_pb2.GrantReadsResponse:
        asked_s = time.monotonic()
        answer = self.ask(request)
        until_s = asked_s + max(1.0, answer.lifetime_seconds - MARGIN_S)
        for each in answer.grants:
            info = ObjectInfo(each.key, each.size, each.tag, float(each.modified_unix_s))
            self._grants[checked_key(each.key)] = _Grant(info, each.url, until_s)
        return answer

    def _read(self, grant: _Grant, start: int, length: int) -> bytes:
        """Read a part of an object.

        Raises:
            _RefusedError: the grant has ended.
            MissingError: the object was removed.
            StoreError: the store is unavailable, or the object is another one by now.
        """
        # Never the URL: it opens the object.
        where = f"{self.url}/{grant.info.key}"
        headers: Mapping[str, str] = {"Range": f"bytes={start}-{start + length - 1}"}
        try:
            answer = self._pool.request(
                "GET",
                grant.url,
                headers=headers,
                timeout=_LIMITS,
                retries=_RETRIES,
                redirect=False,
                preload_content=False,
            )
            try:
                # One more byte shows an object that is larger than the grant says.
                data = answer.read(length + 1, decode_content=False)
            finally:
                answer.close()  # a connection that gave all of its answer is kept
        except (HTTPError, ValueError, OSError) as cause:
            raise StoreError(f"{where}: {type(cause).__name__}") from None
        if answer.status in {401, 403}:
            raise _RefusedError(f"{where}: the store refuses the grant")
        if answer.status == 404:
            raise MissingError(where)
        if answer.status != 206 and not (answer.status == 200 and start == 0):
            raise StoreError(f"{where}: the store answers with status {answer.status}")
        return bytes(exact(memoryview(data), length, where))
