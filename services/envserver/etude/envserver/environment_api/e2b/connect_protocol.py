"""The Connect protocol over HTTP/1.1, with JSON, as envd's clients speak it.

Source: https://connectrpc.com/docs/protocol.
"""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from etude.common.errors import EtudeError, InvalidFieldError
from etude.envserver.environment_api.api_keys import UnknownKeyError
from etude.envserver.environment_api.pool_client import public_error

Json = dict[str, Any]
Errors = (EtudeError, grpc.aio.AioRpcError)

STREAM_TYPE = "application/connect+json"
_END = 0x02
_HEADER = struct.Struct(">BI")
MAX_MESSAGE_BYTES = 1 << 20

_STATUS = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "unimplemented": 404,
    "already_exists": 409,
    "failed_precondition": 400,
    "resource_exhausted": 429,
    "unavailable": 503,
    "deadline_exceeded": 504,
}


def error_body(error: EtudeError | grpc.aio.AioRpcError) -> Json:
    """Body of an error for a Connect client."""
    code, message = public_error(error)
    if isinstance(error, UnknownKeyError):
        return {"code": "unauthenticated", "message": message}
    if code is grpc.StatusCode.CANCELLED:
        return {"code": "canceled", "message": message}
    return {"code": code.name.lower(), "message": message}


def error_response(found: Json) -> JSONResponse:
    """Response to a call that failed as a whole."""
    return JSONResponse(found, _STATUS.get(found["code"], 500))


async def read_message(request: Request) -> Json:
    """Read the one message of a request, with or without an envelope.

    Raises:
        InvalidFieldError: there is none.
    """
    body = await request.body()
    if request.headers.get("content-type", "").startswith(STREAM_TYPE):
        if len(body) < _HEADER.size:
            raise InvalidFieldError("body", "ends before its first message")
        flags, size = _HEADER.unpack_from(body)
        body = body[_HEADER.size :]
        if flags or size != len(body):
            raise InvalidFieldError("body", "is not one uncompressed message")
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError("body", "is not JSON") from error
    if not isinstance(found, dict):
        raise InvalidFieldError("body", "is not a JSON object")
    return found


def stream_response(events: AsyncIterator[Json], *, keepalive_s: float | None) -> StreamingResponse:
    """Response that streams events, with keepalives in pauses."""
    return StreamingResponse(_enveloped(events, keepalive_s), media_type=STREAM_TYPE)


async def _enveloped(
    events: AsyncIterator[Json], keepalive_s: float | None
) -> AsyncIterator[bytes]:
    trailer: Json = {}
    try:
        async for event in _with_pauses(events, keepalive_s):
            yield _envelope(0, {"event": event})
    except Errors as error:
        trailer = {"error": error_body(error)}
    yield _envelope(_END, trailer)


async def _with_pauses(
    events: AsyncIterator[Json], keepalive_s: float | None
) -> AsyncIterator[Json]:
    following: asyncio.Task[Json] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(events, _LAST))
            done, _ = await asyncio.wait([following], timeout=keepalive_s)
            if not done:
                yield {"keepalive": {}}
                continue
            event, following = following.result(), None
            if event is _LAST:
                return
            yield event
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait([following])


_LAST: Json = {}


def _envelope(flags: int, content: Mapping[str, Any]) -> bytes:
    data = json.dumps(content).encode()
    return _HEADER.pack(flags, len(data)) + data


def text_field(content: Mapping[str, Any], name: str) -> str:
    """A text field, empty if absent.

    Raises:
        InvalidFieldError: it is something else.
    """
    found = content.get(name, "")
    if not isinstance(found, str):
        raise InvalidFieldError(name, "is not text")
    return found


def object_field(content: Mapping[str, Any], name: str) -> Json:
    """An object field, empty if absent.

    Raises:
        InvalidFieldError: it is something else.
    """
    found = content.get(name) or {}
    if not isinstance(found, dict):
        raise InvalidFieldError(name, "is not an object")
    return found


def number_field(content: Mapping[str, Any], name: str, *, most: int) -> int:
    """A count, 0 if absent.

    Raises:
        InvalidFieldError: it is something else, or too large.
    """
    found = content.get(name, 0)
    if isinstance(found, str) and found.isdecimal():
        found = int(found[:20])
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
        raise InvalidFieldError(name, f"is not a number from 0 to {most}")
    return found


def text_map_field(content: Mapping[str, Any], name: str) -> dict[str, str]:
    """A field that maps text to text.

    Raises:
        InvalidFieldError: it is something else.
    """
    found = object_field(content, name)
    if not all(isinstance(value, str) for value in found.values()):
        raise InvalidFieldError(name, "has a value that is not text")
    return found
