"""One HTTP request and its response, over ASGI, limited in size and time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.common.errors import EtudeError
from etude.gateway.turn_request import FinishedTurn, TurnEvent

BODY_S = 60.0
"""For the whole of a request's body."""
SEND_S = 60.0
"""For one piece of a response; slower clients are disconnected."""
KEEP_ALIVE_S = 15.0
"""A stream that was silent for so long is given a sign of life."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that collect a response would hold a stream back.
    (b"x-accel-buffering", b"no"),
)


class RequestError(EtudeError):
    """A request that is refused with a status of HTTP."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class DisconnectedError(EtudeError):
    """The client went away, or takes nothing."""


@dataclass(slots=True)
class HttpExchange:
    """One request and its response."""

    scope: Mapping[str, Any]
    receive: Receive
    send: Send
    max_body_bytes: int
    status: int = 0
    """Of the response; 0 until its head is sent."""

    @property
    def path(self) -> str:
        """Path of the request."""
        path: str = self.scope["path"]
        return path

    def read_header(self, name: bytes) -> str:
        """Read a header of the request; empty if it has none of this name."""
        found = (value for key, value in self.scope["headers"] if key == name)
        return next(found, b"").decode("latin-1")

    async def read_body(self) -> bytes:
        """Read the body.

        Raises:
            RequestError: it is too large, or takes too long.
            DisconnectedError: the client went away.
        """
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise DisconnectedError("the client went away")
                    data += message.get("body", b"")
                    if len(data) > self.max_body_bytes:
                        limit = f"the body is larger than {self.max_body_bytes} bytes"
                        raise RequestError(413, limit)
                    if not message.get("more_body", False):
                        return bytes(data)
        except TimeoutError:
            raise RequestError(408, f"the body took longer than {BODY_S:g} s") from None

    async def send_json(
        self, status: int, value: Mapping[str, object], headers: Headers = ()
    ) -> None:
        """Send a whole response."""
        body = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        size = (b"content-length", b"%d" % len(body))
        await self._send_head(status, [(b"content-type", b"application/json"), size, *headers])
        await self.send_part(body, is_last=True)

    async def start_stream(self, headers: Headers) -> None:
        """Send the head of a stream of events."""
        await self._send_head(200, [*_STREAM, *headers])

    async def send_part(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body."""
        if data or is_last:
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _send_head(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def _send(self, message: Message) -> None:
        """Send one message.

        Raises:
            DisconnectedError: the client takes nothing.
        """
        try:
            async with asyncio.timeout(SEND_S):
                await self.send(message)
        except (TimeoutError, OSError) as error:
            raise DisconnectedError("the client takes nothing") from error

    async def follow(
        self, events: AsyncGenerator[TurnEvent, None]
    ) -> AsyncGenerator[TurnEvent | None, None]:
        """Pass the events of a turn on; None wherever nothing happened for a while.

        Raises:
            DisconnectedError: the client went away; the turn is ended.
        """
        gone = asyncio.create_task(self._wait_disconnected(), name="disconnect")
        following: asyncio.Task[TurnEvent | None] | None = None
        try:
            while True:
                following = asyncio.create_task(_next_event(events), name="event")
                while not await _is_ready(following, gone):
                    yield None
                event = following.result()
                if event is None:
                    return
                yield event
                if isinstance(event, FinishedTurn):
                    return
        finally:
            await _cancel(gone)
            if following is not None:
                await _cancel(following)
            await events.aclose()

    async def _wait_disconnected(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


async def _is_ready(following: "asyncio.Task[Any]", gone: "asyncio.Task[None]") -> bool:
    """Wait for an event for a while; false if there is none.

    Raises:
        DisconnectedError: the client went away first.
    """
    await asyncio.wait({following, gone}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
    if gone.done() and not following.done():
        raise DisconnectedError("the client went away")
    return following.done()


async def _next_event(events: AsyncGenerator[TurnEvent, None]) -> TurnEvent | None:
    return await anext(events, None)


async def _cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
