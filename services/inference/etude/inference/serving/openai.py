"""OpenAI-compatible endpoint: vLLM's own application behind an ASGI middleware."""

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from typing_extensions import override

from etude.common.errors import UnavailableError

VERSION_HEADER = b"x-policy-version"

SERVED_PATHS = frozenset(
    {
        "/health",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    }
)
"""Served and tested paths; vLLM's application has some forty."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PolicyVersionMiddleware:
    """Passes known paths on while a version is live, and adds its name to the response."""

    app: AsgiApp
    version: Callable[[], str | None]
    """The live policy version; empty for a folder's own weights; None while nothing is loaded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, by the ASGI protocol."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        version = self.version()
        if scope["path"] not in SERVED_PATHS:
            await _send_error(
                send, 404, "not_found", f"no such path; try {', '.join(sorted(SERVED_PATHS))}"
            )
        elif version is None:
            await _send_error(send, 503, "unavailable", "no verified policy version is loaded yet")
        else:
            await self.app(scope, receive, _with_version_header(send, version))


def _with_version_header(send: Send, version: str) -> Send:
    """Add the version that the request was admitted under; a swap may happen while it runs."""

    async def labelled(message: MutableMapping[str, Any]) -> None:
        if version and message["type"] == "http.response.start":
            headers = [*message.get("headers", []), (VERSION_HEADER, version.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return labelled


async def _send_error(send: Send, status: int, code: str, what: str) -> None:
    body = json.dumps({"error": {"message": what, "type": code, "param": None, "code": status}})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


class _SignalFreeServer(uvicorn.Server):
    """Leaves signals to the process's main."""

    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class HttpServer:
    """Serves one application on one port."""

    app: AsgiApp
    host: str
    port: int
    """0 picks a free port; after start() the real one."""
    _server: _SignalFreeServer = field(init=False)
    _task: "asyncio.Task[None]" = field(init=False)

    async def start(self) -> None:
        """Listen and serve.

        Raises:
            OSError: the port is taken.
            UnavailableError: the application did not start.
        """
        listener = socket.create_server((self.host, self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self.app, log_level="warning", access_log=False)
        self._server = _SignalFreeServer(config)
        serving = self._server.serve(sockets=[listener])
        self._task = asyncio.create_task(serving, name="openai-http")
        while not self._server.started:
            if self._task.done():
                raise UnavailableError("the OpenAI endpoint did not start: see its log")
            await asyncio.sleep(0.02)

    async def stop(self, grace_s: float) -> None:
        """Let running responses end for the grace time, then close."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        await self._task
