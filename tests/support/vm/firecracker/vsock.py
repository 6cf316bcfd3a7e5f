"""The socket of a guest: CONNECT PORT, OK PORT, then bytes, as docs/vsock.md of Firecracker says.

A connection before the guest listens is ended. A snapshot ends every connection as the guest sees
it (docs/snapshotting/snapshot-support.md, "Vsock device"): to the host that shows when it writes.
"""

import asyncio
import contextlib
import itertools
from pathlib import Path

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.qemu.vm import QemuVm

PORT = 1024
"""Where the agent listens."""
_LINE_BYTES = 32
_ASK_LIMIT_S = 2.0
_READ_BYTES = 1 << 16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Vsock:
    """Bridges hosts, one after the other, to the serial port at which the agent really is."""

    def __init__(self, vm: QemuVm, *, is_booting: bool) -> None:
        """Nobody is connected."""
        self.runs = asyncio.Event()
        self._vm, self._is_listening = vm, not is_booting
        self._first: tuple[Streams, bytes] | None = None
        self._turn = asyncio.Lock()
        self._bridges: set[Bridge] = set()
        self._numbers = itertools.count(1 << 30)
        self._hello = asyncio.create_task(self._await_hello()) if is_booting else None

    async def serve(self, path: Path) -> None:
        """Listen from here on; the file must not be there yet."""
        await asyncio.start_unix_server(self._connected, path=path)

    def reset(self) -> None:
        """End every connection, as a snapshot does."""
        for bridge in self._bridges:
            bridge.cut()

    async def _await_hello(self) -> None:
        """The agent listens when it would say HELLO to its first host."""
        streams = await self._dialled()
        self._first = (streams, await streams[0].read(_READ_BYTES))
        self._is_listening = True

    async def _dialled(self) -> Streams:
        return await asyncio.open_unix_connection(sock=await self._vm.agent())

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, TimeoutError, VmmError, ValueError):
            async with asyncio.timeout(_ASK_LIMIT_S):
                line = await reader.readuntil(b"\n")
                await self.runs.wait()
            words = line.split()
            is_agents = len(line) <= _LINE_BYTES and words == [b"CONNECT", str(PORT).encode()]
            if is_agents and self._is_listening:
                writer.write(f"OK {next(self._numbers)}\n".encode())
                await self._bridged(reader, writer)
        writer.close()

    async def _bridged(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._turn:
            first, self._first = self._first, None
            streams, said = first if first is not None else (await self._dialled(), b"")
            writer.write(said)
            bridge = Bridge(reader, writer, *streams)
            self._bridges.add(bridge)
            try:
                await bridge.run()
            finally:
                self._bridges.discard(bridge)


class Bridge:
    """One connection of a host."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_guest: asyncio.StreamReader,
        to_guest: asyncio.StreamWriter,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._from_guest, self._to_guest = from_guest, to_guest
        self._is_cut = False
        self._last: asyncio.Task[None] | None = None

    def cut(self) -> None:
        """End the guest's side; the host's ends when it writes."""
        self._is_cut = True
        self._to_guest.close()

    async def run(self) -> None:
        """Carry bytes until either side ends."""
        up = asyncio.create_task(self._up())
        down = asyncio.create_task(self._down())
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        if self._is_cut:
            # The next host is served meanwhile.
            self._last = asyncio.create_task(self._linger(up), name="a connection that was cut")
            return
        up.cancel()
        down.cancel()
        self._to_guest.close()
        self._writer.close()

    async def _linger(self, up: "asyncio.Task[None]") -> None:
        await asyncio.wait([up])
        self._writer.close()

    async def _up(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._reader.read(_READ_BYTES):
                if self._is_cut:
                    return
                self._to_guest.write(data)
                await self._to_guest.drain()

    async def _down(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._from_guest.read(_READ_BYTES):
                self._writer.write(data)
                await self._writer.drain()
