"""Reads of a host that has no credentials: by grants of its pool's brokers, each kept as a copy."""

import asyncio
import contextlib
import os
import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import grpc
from blake3 import blake3
from typing_extensions import override

from etude.common import stores
from etude.common.blobs import DeniedError, Store
from etude.common.errors import StoreError
from etude.common.store_urls import folder_of
from etude.envserver.host.broker_links import BrokerLinks
from etude.envserver.read_grants.granted_store import Ask, GrantedStore
from etude.envserver.storage.store_reads import DirectReads, StoreReads
from etude.v1 import environments_pb2

MOST_COPIES = 2_048
"""Copies of prefixes on one host, twice as many as it may have leases: a run has tasks enough to
fill the disk."""
ASK_S = 60.0
"""A broker asks the store first, for each object."""
_COPY = "granted-"
_REFUSED = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)


@dataclass(frozen=True, slots=True)
class GrantedReads(StoreReads):
    """Reads by grants; folders of this machine are read as they are."""

    ask: Ask

    @override
    def open(self, uri: str) -> Store:
        return GrantedStore(uri, self.ask) if uri.startswith("s3://") else DirectReads().open(uri)

    @override
    def local_folder(self, uri: str, scratch: Path) -> Path:
        folder = folder_of(uri)
        if folder is not None:
            return stores.existing_folder(folder, uri)
        # Content behind a URI never changes, and brokers that start again forget their orders: a
        # daemon that adopts leases must not need another grant.
        address = blake3(uri.encode()).hexdigest(length=16)
        target = scratch / "inputs" / f"{_COPY}{address}" / PurePosixPath(uri).name
        if target.exists():
            os.utime(target.parent)
        else:
            store = self.open(uri)
            stores.download_objects(store, stores.list_objects(store, uri), target)
            _remove_oldest(scratch / "inputs")
        return target

    @override
    def visit_folder(self, uri: str, scratch: Path) -> AbstractContextManager[Path]:
        return contextlib.nullcontext(self.local_folder(uri, scratch))


def _remove_oldest(folder: Path) -> None:
    """Remove the copies that were used longest ago, beyond those of living leases."""
    for copy in sorted(folder.glob(f"{_COPY}*"), key=_find_last_use, reverse=True)[MOST_COPIES:]:
        shutil.rmtree(copy, ignore_errors=True)


def _find_last_use(copy: Path) -> float:
    """Find when a copy was used last: long ago, if another thread removes it now."""
    with contextlib.suppress(FileNotFoundError):
        return copy.stat().st_mtime
    return 0.0


@dataclass(frozen=True, slots=True)
class BrokerGrants:
    """Asks the pool's brokers, from threads other than the event loop's."""

    brokers: BrokerLinks
    loop: asyncio.AbstractEventLoop

    def ask(
        self, request: environments_pb2.GrantReadsRequest
    ) -> environments_pb2.GrantReadsResponse:
        """Ask one broker after the other until one grants: each knows its own orders alone.

        Raises:
            DeniedError: all refuse.
            StoreError: none grants, and one does not answer: it may be the one that would.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(request), self.loop).result()

    async def _ask(
        self, request: environments_pb2.GrantReadsRequest
    ) -> environments_pb2.GrantReadsResponse:
        refusal = failure = ""
        for target in await self.brokers.candidates(now_s=time.monotonic()):
            try:
                return await self.brokers.stub(target).GrantReads(request, timeout=ASK_S)
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSED:
                    refusal = error.details() or str(error.code())
                else:
                    failure = f"{target}: {error.details()}"
        if refusal and not failure:
            raise DeniedError(f"{request.uri}: no broker grants to read it: {refusal}")
        raise StoreError(f"{request.uri}: a broker does not answer: {failure or 'none is known'}")
