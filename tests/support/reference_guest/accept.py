"""Connections to a port of the sandbox, as the reference agent hands them to the host."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tests.support.reference_guest.calls import Call, RefusedError

from etude.v1 import guest_pb2

_READ_BYTES = 64 << 10
_MAX_PORT = 65_535


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True)
class ReferencePort:
    """A port whose connections wait for calls; it opens with the first."""

    port: int = 0
    _waiting: "asyncio.Queue[_Connection]" = field(default_factory=asyncio.Queue)
    _server: asyncio.Server | None = None

    async def next(self, port: int) -> _Connection:
        """The next connection.

        Raises:
            RefusedError: the port is another one, or somebody else's.
        """
        if self._server is None:
            await self._open(port)
        elif port != self.port:
            what = "the sandbox listens on another port"
            raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, what)
        return await self._waiting.get()

    async def _open(self, port: int) -> None:
        async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._waiting.put_nowait(_Connection(reader, writer))

        if not 0 < port <= _MAX_PORT:
            raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, "not a port")
        try:
            self._server = await asyncio.start_server(keep, "127.0.0.1", port)
        except OSError as error:
            what = "a program of the sandbox has this port"
            raise RefusedError(guest_pb2.GUEST_STATUS_BUSY, what) from error
        self.port = port


class HasPort(Protocol):
    """An agent with a port."""

    @property
    def door(self) -> ReferencePort:
        """Where its programs find the host."""
        ...


async def accept(call: Call, agent: HasPort) -> None:
    """Carry one connection until both directions have ended."""
    reader, writer = await agent.door.next(call.request.accept.port)
    call.tell(1)
    pouring = asyncio.create_task(_pour(call, writer), name=f"stream {call.stream} in")
    try:
        await _draw(call, reader)
        await pouring
    finally:
        pouring.cancel()
        await asyncio.wait([pouring])
        writer.close()


async def _draw(call: Call, reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):  # the program has gone: an end like another
        while data := await reader.read(_READ_BYTES):
            await call.piece(1, data)
    call.end_data(1)


async def _pour(call: Call, writer: asyncio.StreamWriter) -> None:
    try:
        while (piece := await call.receive()) is not None:
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except ConnectionError:
        call.end(guest_pb2.GUEST_STATUS_CANCELLED)
