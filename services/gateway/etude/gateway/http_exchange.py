"""One HTTP request and its response, over ASGI, limited in size and time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.common.errors import EtudeError

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
    is_whole: bool = False
    """True once the last part of the response is sent."""
    sent_s: float = 0.0
    """Time of the loop at the last part, or sign of life."""

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
            self.is_whole, self.sent_s = is_last, asyncio.get_running_loop().time()
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

    @contextlib.asynccontextmanager
    async def serve_while_connected(self, keep_alive: bytes) -> AsyncGenerator[None, None]:
        """Cancel the block once the client goes away; a silent stream gives signs of life.

        Args:
            keep_alive: sign of life of a stream.

        Raises:
            DisconnectedError: the client went away, or takes nothing.
            CancelledError: the block was cancelled by others.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine of one

        def end(_: "asyncio.Task[None]") -> None:
            # The server reports a whole response as the end of the connection, too.
            if not self.is_whole:
                task.cancel()

        self.sent_s = asyncio.get_running_loop().time()
        # A task for each event instead would cost more than the event.
        gone = asyncio.create_task(self._watch_client(keep_alive), name="client")
        gone.add_done_callback(end)
        try:
            yield
        except asyncio.CancelledError:
            if not gone.done() or task.uncancel():
                raise  # the process ends
            raise DisconnectedError("the client went away") from None
        finally:
            gone.remove_done_callback(end)
            await _cancel(gone)

    async def _watch_client(self, keep_alive: bytes) -> None:
        """Return once the client is gone."""
        while True:
            try:
                async with asyncio.timeout_at(self.sent_s + KEEP_ALIVE_S):
                    message = await self.receive()
            except TimeoutError:
                now_s = asyncio.get_running_loop().time()
                if now_s < self.sent_s + KEEP_ALIVE_S:
                    continue
                self.sent_s = now_s
                if self.status and not self.is_whole:
                    await self.send_part(keep_alive)
            else:
                if message["type"] == "http.disconnect":
                    return


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
