"""Middleware of the environment API: limits on size and time of requests, and error responses."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.agent.workspace import MAX_FILE_BYTES
from etude.common.errors import EtudeError, FullError
from etude.envserver.environment_api.api_keys import UnknownKeyError
from etude.envserver.environment_api.e2b import connect_protocol
from etude.envserver.environment_api.pool_client import http_status, public_error

log = logging.getLogger(__name__)

BODY_S = 60.0
"""For the whole of a body: 8 MiB at 140 KiB a second."""
SEND_S = 60.0
"""For one piece of a response; slower clients are disconnected."""
_BODY_BYTES = 1 << 20
_FILES_BODY_BYTES = MAX_FILE_BYTES + (1 << 20)
"""A file, and a form's overhead."""


@dataclass(slots=True)
class RequestLimits:
    """ASGI middleware that limits size and time of each request."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request within the limits."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        most = _FILES_BODY_BYTES if scope["path"] == "/files" else _BODY_BYTES
        await self.app(scope, _Body(receive, most).receive, send_in_time)


@dataclass(slots=True)
class _Body:
    """A request body, limited in size and time."""

    inner: Receive
    most: int
    num_bytes: int = 0
    is_complete: bool = False
    ends_s: float = 0.0

    async def receive(self) -> Message:
        """The next piece.

        Raises:
            HTTPException: it is too much, or takes too long.
        """
        if self.is_complete:
            return await self.inner()
        self.ends_s = self.ends_s or asyncio.get_running_loop().time() + BODY_S
        try:
            async with asyncio.timeout_at(self.ends_s):
                message = await self.inner()
        except TimeoutError:
            raise HTTPException(408, f"the body took longer than {BODY_S:g} s") from None
        self.num_bytes += len(message.get("body", b""))
        if self.num_bytes > self.most:
            raise HTTPException(413, f"the body is larger than {self.most} bytes")
        self.is_complete = not message.get("more_body", False)
        return message


def error_handlers() -> Mapping[Any, Callable[[Request, Any], Awaitable[Response]]]:
    """Exception handlers by class."""
    return {
        EtudeError: _answer_known_error,
        grpc.aio.AioRpcError: _answer_known_error,
        HTTPException: _answer_http_error,
        Exception: _answer_unexpected,
    }


async def _answer_known_error(
    request: Request, error: EtudeError | grpc.aio.AioRpcError
) -> Response:
    if request.url.path.startswith(("/process.", "/filesystem.")):
        return connect_protocol.error_response(connect_protocol.error_body(error))
    if isinstance(error, UnknownKeyError):
        return _json_error(401, str(error))
    code, words = public_error(error)
    answer = _json_error(http_status(code), words)
    if isinstance(error, FullError):
        answer.headers["retry-after"] = str(round(error.retry_after_s))
    return answer


async def _answer_http_error(_: Request, error: HTTPException) -> Response:
    answer = _json_error(error.status_code, error.detail)
    if error.status_code in {408, 413}:
        answer.headers["connection"] = "close"
    return answer


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    incident = uuid.uuid4().hex[:12]
    # The route rather than the address, which may hold a key.
    route = getattr(request.scope.get("route"), "path", "no route")
    log.error("incident %s at %s", incident, route, exc_info=error)
    return _json_error(500, f"internal error, see incident {incident} in the log")


def _json_error(status: int, words: str) -> JSONResponse:
    return JSONResponse({"code": status, "message": words}, status)
