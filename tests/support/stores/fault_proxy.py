"""An HTTP proxy that stands between a client and an S3 server, and misbehaves on purpose."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote, urlparse

from tests.support.stores.store_faults import Fault, Schedule

SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 73\r\n"
    b"Connection: close\r\n\r\n"
    b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>\n"
)
FORBIDDEN = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: 74\r\n"
    b"Connection: close\r\n\r\n"
    b"<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>\n"
)


class _Request(NamedTuple):
    method: str
    target: str
    raw: bytes


class FaultProxy:
    """One request per connection; every fault of `Fault` but FLIPPED, which TLS would not let by.

    A schedule sees the HTTP method as the call, and the path as the key.
    """

    def __init__(self, endpoint: str, faults: Schedule, slow_s: float = 0.05) -> None:
        address = urlparse(endpoint)
        assert address.hostname is not None
        assert address.port is not None
        self._upstream = (address.hostname, address.port)
        self._faults = faults
        self._slow_s = slow_s
        self.endpoint = ""

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.endpoint = "http://{}:{}".format(*server.sockets[0].getsockname())
        started.set()
        async with server:
            await stop.wait()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._exchange(await _request(reader), writer)
        finally:
            writer.close()

    async def _exchange(self, request: _Request, writer: asyncio.StreamWriter) -> None:
        fault = self._faults.next(request.method, unquote(urlparse(request.target).path))
        answer = await self._answer(request, fault)
        if fault in {Fault.RESET, Fault.LOST_REPLY}:
            writer.transport.abort()
            return
        writer.write(answer[:-1] if fault is Fault.CUT else answer)
        await writer.drain()

    async def _answer(self, request: _Request, fault: Fault | None) -> bytes:
        match fault:
            case Fault.UNAVAILABLE:
                return SLOW_DOWN
            case Fault.DENIED:
                return FORBIDDEN
            case Fault.RESET:
                return b""
            case Fault.SLOW:
                await asyncio.sleep(self._slow_s)
            case Fault.LOST_REPLY | Fault.CUT | Fault.FLIPPED | None:
                pass
        return await self._forwarded(request)

    async def _forwarded(self, request: _Request) -> bytes:
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(request.raw)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()


async def _request(reader: asyncio.StreamReader) -> _Request:
    """One whole request, changed to close its connection; the signature does not cover that."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    fields = {
        name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)
    }
    body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    raw = b"\r\n".join([first, *kept, b"Connection: close", b"", body])
    method, target, _ = first.decode("ascii").split(" ")
    return _Request(method, target, raw)


@contextlib.contextmanager
def fault_proxy(endpoint: str, faults: Schedule, slow_s: float = 0.05) -> Iterator[str]:
    """The endpoint of a proxy before `endpoint`, served from a thread."""
    proxy, started, loop = FaultProxy(endpoint, faults, slow_s), threading.Event(), None
    stop = asyncio.Event()

    async def serve() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        await proxy.serve(started, stop)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="fault-proxy", daemon=True)
    thread.start()
    assert started.wait(30), "the proxy did not start"
    try:
        yield proxy.endpoint
    finally:
        assert loop is not None
        loop.call_soon_threadsafe(stop.set)
        thread.join()
