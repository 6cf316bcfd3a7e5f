"""Client of a Firecracker process's API, whose guest may have taken it over.

Covered: answers that are too long, truncated, not HTTP or not JSON, and timeouts. Each ends with a
VmmError, in every method. Each request has its own connection, so that a later process can take
over.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from socket import socket
from typing import Any

from etude.envserver.drivers.vm.errors import VmmError

LIMIT_S = 30.0
"""An idle machine answers in a millisecond; a busy one may have no core free."""
_MAX_HEAD_BYTES = 16 << 10
_MAX_BODY_BYTES = 64 << 10
_MAX_FAULT_CHARS = 500

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class FirecrackerApi:
    """API socket of one process."""

    dial: Callable[[], socket]
    """Opens a connection, non-blocking; raises VmmError."""

    async def get(self, path: str) -> Mapping[str, Any]:
        return await self._answer("GET", path, None, LIMIT_S)

    async def put(self, path: str, body: Body, *, limit_s: float = LIMIT_S) -> None:
        await self._answer("PUT", path, body, limit_s)

    async def patch(self, path: str, body: Body) -> None:
        await self._answer("PATCH", path, body, LIMIT_S)

    async def _answer(
        self, method: str, path: str, body: Body | None, limit_s: float
    ) -> Mapping[str, Any]:
        what = f"{method} {path}"
        reader, writer = await asyncio.open_unix_connection(sock=self.dial(), limit=_MAX_HEAD_BYTES)
        try:
            async with asyncio.timeout(limit_s):
                writer.write(_request(method, path, body))
                await writer.drain()
                return await _response(reader, what)
        except TimeoutError as cause:
            raise VmmError(f"{what}: no answer in {limit_s:g} s") from cause
        except (OSError, EOFError, asyncio.LimitOverrunError) as cause:
            raise VmmError(f"{what}: the connection broke: {cause}") from cause
        finally:
            writer.close()


def _request(method: str, path: str, body: Body | None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
    if data:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return f"{head}\r\n".encode() + data


async def _response(reader: asyncio.StreamReader, what: str) -> Mapping[str, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *lines = head.split("\r\n")
    size = _size(lines, what)
    body = await reader.readexactly(size) if size else b""
    match status.split(" ", 2)[:2]:
        case ["HTTP/1.1" | "HTTP/1.0", code] if code in {"200", "204"}:
            return _object(body, what) if body else {}
        case ["HTTP/1.1" | "HTTP/1.0", code]:
            raise VmmError(f"{what}: {_fault(body) or f'refused with {code[:20]}'}")
        case _:
            raise VmmError(f"{what}: the answer is not HTTP")


def _size(lines: list[str], what: str) -> int:
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            value = value.strip()
            if not value.isdecimal() or len(value) > len(str(_MAX_BODY_BYTES)):
                raise VmmError(f"{what}: the answer has no valid length")
            if int(value) > _MAX_BODY_BYTES:
                raise VmmError(f"{what}: the answer is longer than {_MAX_BODY_BYTES} bytes")
            return int(value)
    return 0


def _object(body: bytes, what: str) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise VmmError(f"{what}: the answer is not JSON") from cause
    if not isinstance(found, dict):
        raise VmmError(f"{what}: the answer is not a JSON object")
    return found


def _fault(body: bytes) -> str:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    match found:
        case {"fault_message": str(text)}:
            return text[:_MAX_FAULT_CHARS]
        case _:
            return ""
