"""Middleware of the environment API: limits on the size of requests, and error responses."""

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from etude.agent.workspace import MAX_FILE_BYTES
from etude.common.errors import EtudeError, FullError
from etude.envserver.environment_api.api_keys import UnknownKeyError
from etude.envserver.environment_api.e2b import connect_protocol
from etude.envserver.environment_api.pool_client import http_status, public_error

log = logging.getLogger(__name__)

_BODY_BYTES = 1 << 20
_FILES_BODY_BYTES = MAX_FILE_BYTES + (1 << 20)
"""A file, and a form's overhead."""


def max_body_bytes(path: str) -> int:
    """Limit of the body of a request."""
    return _FILES_BODY_BYTES if path == "/files" else _BODY_BYTES


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
