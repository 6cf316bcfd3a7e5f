"""Exchange of one HTTP request and its response, with credentials added and watched for."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import h11

from etude.envserver.egress import proxy_request
from etude.envserver.egress.byte_streams import ByteStream
from etude.envserver.egress.credentials import CredentialEchoError, EchoGuard, watched_parts
from etude.envserver.egress.environment_egress import EgressAttempt, EnvironmentEgress
from etude.envserver.egress.proxy_request import Headers

IDLE_S = 60.0
"""Between two pieces of a body, or from a request to its answer."""
_MAX_HEAD_BYTES = 64 << 10


async def send_answer(
    client: ByteStream, connection: h11.Connection, status: int, body: bytes
) -> None:
    """Send a short response of the proxy itself."""
    headers = [
        ("content-type", "text/plain; charset=utf-8"),
        ("content-length", str(len(body))),
        ("connection", "close"),
    ]
    head = h11.Response(status_code=status, headers=headers, reason=b"Refused")
    parts = (head, h11.Data(data=body), h11.EndOfMessage())
    await client.write(b"".join(connection.send(part) or b"" for part in parts))
    await client.finish()


@dataclass(slots=True)
class HttpExchange:
    """One request and its answer."""

    client: ByteStream
    inward: h11.Connection
    server: ByteStream
    egress: EnvironmentEgress
    attempt: EgressAttempt
    is_limited: bool
    """True if a rule restricts more than the host of the request."""
    _outward: h11.Connection = field(init=False)
    _guard: EchoGuard = field(default_factory=lambda: EchoGuard(frozenset()))

    def __post_init__(self) -> None:
        self._outward = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)

    async def run(
        self, request: h11.Request, target: str, host: str, secret: tuple[bytes, bytes] | None
    ) -> None:
        """Forward the request and the response.

        Args:
            request: as the client sent it.
            target: path and query.
            host: value of the Host header.
            secret: a header that the proxy adds.

        Raises:
            CredentialEchoError: the server sends the secret back.
            OverLimitError: the bytes are used up.
            OSError: either side has gone.
            ProtocolError: either side breaks the protocol.
        """
        if secret is not None:
            self._guard = EchoGuard(watched_parts(secret[1]))
        given = proxy_request.outgoing_headers(request.headers, is_limited=self.is_limited)
        is_chunked = proxy_request.is_chunked(request.headers)
        headers = _outgoing(given, host, secret, is_chunked=is_chunked)
        await self._send(
            h11.Request(method=request.method, target=target.encode("ascii"), headers=headers)
        )
        async for event in self._events(self.inward, self.client):
            if isinstance(event, h11.Data):
                await self._send(h11.Data(data=bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                await self._send(h11.EndOfMessage())
                break
        await self._answer()

    async def _send(self, event: h11.Event) -> None:
        data = self._outward.send(event) or b""
        self.egress.count(self.attempt, sent=len(data))
        if data:
            async with asyncio.timeout(IDLE_S):
                await self.server.write(data)

    async def _answer(self) -> None:
        async for event in self._events(self._outward, self.server):
            if isinstance(event, h11.Response):
                await self._reply(self._head(event))
            elif isinstance(event, h11.Data):
                data = self._guard.filter(bytes(event.data))
                if data:
                    await self._reply(h11.Data(data=data))
            elif isinstance(event, h11.EndOfMessage):
                rest = self._guard.flush()
                if rest:
                    await self._reply(h11.Data(data=rest))
                await self._reply(h11.EndOfMessage())
                await self.client.finish()
                return

    def _head(self, response: h11.Response) -> h11.Response:
        if self._guard.secrets:
            self._guard.check([response.reason, *(value for _, value in response.headers)])
            self._guard.check([name for name, _ in response.headers])
            if any(
                name == b"content-encoding" and value.strip().lower() != b"identity"
                for name, value in response.headers
            ):
                raise CredentialEchoError(
                    "the response is compressed, so it cannot be checked for the credential"
                )
        headers = [*proxy_request.forwarded_headers(response.headers), (b"connection", b"close")]
        return h11.Response(
            status_code=response.status_code, headers=headers, reason=response.reason
        )

    async def _reply(self, event: h11.Event) -> None:
        data = self.inward.send(event) or b""
        self.egress.count(self.attempt, received=len(data))
        if data:
            async with asyncio.timeout(IDLE_S):
                await self.client.write(data)

    async def _events(
        self, connection: h11.Connection, wire: ByteStream
    ) -> AsyncIterator[h11.Event]:
        """Events of one side, up to its end."""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if connection.they_are_waiting_for_100_continue:
                    await self._reply(h11.InformationalResponse(status_code=100, headers=[]))
                async with asyncio.timeout(IDLE_S):
                    connection.receive_data(await wire.read())
            elif isinstance(event, h11.Event):
                yield event
            else:
                return


def _outgoing(
    given: Headers, host: str, secret: tuple[bytes, bytes] | None, *, is_chunked: bool
) -> list[tuple[bytes, bytes]]:
    headers = list(given)
    if is_chunked:
        # Two lengths are one too many: a server might believe the other.
        headers = [each for each in headers if each[0] != b"content-length"]
        headers.append((b"transfer-encoding", b"chunked"))
    if secret is not None:
        # The client's own header of this name, and any that makes the response unreadable.
        replaced = {secret[0], b"accept-encoding", b"range"}
        headers = [each for each in headers if each[0] not in replaced]
        headers += [secret, (b"accept-encoding", b"identity")]
    return [(b"host", host.encode("ascii")), *headers, (b"connection", b"close")]
