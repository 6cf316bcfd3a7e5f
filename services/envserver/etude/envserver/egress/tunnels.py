"""TLS tunnels between a client and a server, opened by CONNECT and checked by SNI."""

import asyncio

import h11

from etude.envserver.egress import policy, tls_client_hello
from etude.envserver.egress.byte_streams import ByteStream
from etude.envserver.egress.environment_egress import EgressAttempt, EnvironmentEgress

IDLE_S = 120.0
"""Without a byte in either direction: idle keep-alive connections."""
HELLO_S = 20.0


class TunnelRefusedError(Exception):
    """The tunnel does not begin with TLS for the host that it was opened for."""


async def run_tunnel(
    client: ByteStream,
    connection: h11.Connection,
    server: ByteStream,
    host: str,
    egress: EnvironmentEgress,
    attempt: EgressAttempt,
) -> None:
    """Open a tunnel, check its ClientHello, and copy bytes until both sides are done.

    Raises:
        TunnelRefusedError: it does not begin with TLS for this host.
        OverLimitError: the bytes are used up.
        OSError: either side has gone.
    """
    await client.write(connection.send(h11.Response(status_code=200, headers=[])) or b"")
    first = await _read_client_hello(client, connection.trailing_data[0], host)
    up = _Direction(client, server, egress, attempt, is_sent=True)
    down = _Direction(server, client, egress, attempt, is_sent=False)
    await up.send(first)
    ways = {
        asyncio.create_task(up.run(), name="tunnel up"),
        asyncio.create_task(down.run(), name="tunnel down"),
    }
    try:
        await _wait_for_both(ways, up, down)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.wait(ways)


async def _read_client_hello(client: ByteStream, seen: bytes, host: str) -> bytes:
    """Read the client's first message.

    Raises:
        TunnelRefusedError: it is for another host, or not TLS.
    """
    data = bytes(seen)
    try:
        async with asyncio.timeout(HELLO_S):
            while not (found := tls_client_hello.read_hello(data)).is_complete:
                more = await client.read()
                if not more:
                    raise TunnelRefusedError("the client sent nothing")
                data += more
    except tls_client_hello.NotTlsError as error:
        raise TunnelRefusedError(str(error)) from error
    if policy.canonical_host(found.server_name) != host:
        raise TunnelRefusedError(f"it is meant for {found.server_name[:255]!r}")
    return data


async def _wait_for_both(ways: set[asyncio.Task[None]], *both: "_Direction") -> None:
    """Wait until both directions are done.

    Raises:
        OSError: one has failed.
        TimeoutError: both are idle.
    """
    pending = set(ways)
    while pending:
        before = [way.num_bytes for way in both]
        done, pending = await asyncio.wait(
            pending, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED
        )
        for way in done:
            way.result()
        if not done and before == [way.num_bytes for way in both]:
            raise TimeoutError("the tunnel is idle")


class _Direction:
    """One direction of a tunnel."""

    def __init__(
        self,
        source: ByteStream,
        sink: ByteStream,
        egress: EnvironmentEgress,
        attempt: EgressAttempt,
        *,
        is_sent: bool,
    ) -> None:
        self.num_bytes = 0
        self._source, self._sink = source, sink
        self._egress, self._attempt, self._is_sent = egress, attempt, is_sent

    async def run(self) -> None:
        """Copy everything, and then the end."""
        while data := await self._source.read():
            await self.send(data)
        await self._sink.finish()

    async def send(self, data: bytes) -> None:
        """Send some bytes.

        Raises:
            OSError: the other side has gone.
            OverLimitError: the bytes are used up.
        """
        sent, received = (len(data), 0) if self._is_sent else (0, len(data))
        self._egress.count(self._attempt, sent=sent, received=received)
        await self._sink.write(data)
        self.num_bytes += len(data)
