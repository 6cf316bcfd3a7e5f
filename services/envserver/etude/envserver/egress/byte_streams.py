"""Byte streams of the proxy: sockets, or connections over a guest's channel."""

import asyncio
import contextlib
import ssl
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

CHUNK_BYTES = 64 << 10
_CLOSE_S = 2.0


class ByteStream(Protocol):
    """Bytes in both directions. Every method raises OSError once the other side has gone."""

    async def read(self) -> bytes:
        """The next bytes; none at the end of the other side's data."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of it, as fast as the other side takes it."""
        ...

    async def finish(self) -> None:
        """Close the sending direction; reading goes on."""
        ...

    async def close(self) -> None:
        """End both directions; safe to repeat, and never fails."""
        ...


@dataclass(slots=True)
class SocketStream(ByteStream):
    """A connection of this process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @override
    async def read(self) -> bytes:
        return await self.reader.read(CHUNK_BYTES)

    @override
    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    @override
    async def finish(self) -> None:
        # TLS cannot close one direction alone.
        if self.writer.can_write_eof() and not self.writer.is_closing():
            self.writer.write_eof()

    @override
    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.writer.wait_closed()
        self.writer.transport.abort()
