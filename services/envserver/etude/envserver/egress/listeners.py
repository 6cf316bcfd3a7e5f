"""Listeners inside environments: sockets whose connections the proxy serves."""

import asyncio
import contextlib
import socket
from typing import NamedTuple
from weakref import WeakValueDictionary

from etude.envserver.egress.byte_streams import CHUNK_BYTES, SocketStream
from etude.envserver.egress.environment_egress import EnvironmentEgress
from etude.envserver.egress.proxy import serve_connection

_AGAIN_S = 1.0


class EgressListener:
    """One listening socket of an environment, until it is closed."""

    def __init__(self, listener: socket.socket, egress: EnvironmentEgress) -> None:
        listener.setblocking(False)  # noqa: FBT003 - the only way to say it
        self._listener = listener
        self._egress = egress
        self._serving: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept(), name=f"egress {egress.lease_id}")
        # The loop no longer uses it by then.
        self._task.add_done_callback(lambda _: listener.close())

    def close(self) -> None:
        """Stop serving: open connections are cut."""
        self._task.cancel()
        for task in self._serving:
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is free
                await asyncio.sleep(_AGAIN_S)
                continue
            # Acquired after accept: an idle listener must not hold a slot that another one needs.
            # One connection of each listener waits here, the others in its backlog.
            try:
                await self._egress.connection_slots.acquire()
            except BaseException:
                connection.close()
                raise
            task = asyncio.create_task(self._serve(connection), name="egress connection")
            self._serving.add(task)
            task.add_done_callback(self._on_served)

    def _on_served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._egress.connection_slots.release()

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has gone before it was looked at
            reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)
            await serve_connection(SocketStream(reader, writer), self._egress)


class _Key(NamedTuple):
    lease: str
    number: str
    """Number of the command whose network it is; empty for the whole lease's."""


class EgressListeners:
    """The listeners of all environments of a host."""

    def __init__(self) -> None:
        self._by_lease: WeakValueDictionary[str, EnvironmentEgress] = WeakValueDictionary()
        self._open: dict[_Key, EgressListener] = {}

    def allow(self, egress: EnvironmentEgress) -> None:
        """Allow listeners for this environment, for as long as its egress object lives."""
        self._by_lease[egress.lease_id] = egress

    def has(self, lease: str) -> bool:
        """True if an environment has egress."""
        return lease in self._by_lease

    def open(self, lease: str, number: str, listener: socket.socket) -> None:
        """Serve the connections of a listening socket, and own it from now on."""
        egress = self._by_lease.get(lease)
        if egress is None:
            listener.close()
            return
        self._open[_Key(lease, number)] = EgressListener(listener, egress)

    def close(self, lease: str = "", *, number: str = "") -> None:
        """Close the listener of a lease's shared network, or that of one command."""
        for key in list(self._open):
            if key.number == number and (number or key.lease == lease):
                self._open.pop(key).close()

    def close_all(self) -> None:
        while self._open:
            _, listener = self._open.popitem()
            listener.close()
