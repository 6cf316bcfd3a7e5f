"""Requests to a Firecracker process, whose guest may have taken it over.

Covered: answers that are too long, cut off, no HTTP or no JSON, and silence. Each ends with a
VmmError. Every request has a connection of its own, so that whoever comes later needs none of an
earlier process.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from socket import socket
from typing import Any

from etude.envserver.drivers.machines.errors import VmmError

LIMIT_S = 30.0
"""A neighbour may hold every core; an idle machine answers in a millisecond."""
_MAX_HEAD_BYTES = 16 << 10
_MAX_BODY_BYTES = 64 << 10
_MAX_FAULT_CHARS = 500

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Api:
    """The API socket of one process."""

    dial: Callable[[], socket]
    """A new connection, not blocking; raises VmmError."""

    async def get(self, path: str) -> Mapping[str, Any]:
        """What is so.

        Raises:
            VmmError: it was refused, took too long, or the connection ended.
        """
        return await self._answer("GET", path, None, LIMIT_S)

    async def put(self, path: str, body: Body, *, limit_s: float = LIMIT_S) -> None:
        """Make it so.

        Raises:
            VmmError: it was refused, took too long, or the connection ended.
        """
        await self._answer("PUT", path, body, limit_s)

    async def patch(self, path: str, body: Body) -> None:
        """Change it.

        Raises:
            VmmError: it was refused, took too long, or the connection ended.
        """
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
            raise VmmError(f"{what}: the answer is no HTTP")


def _size(lines: list[str], what: str) -> int:
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            value = value.strip()
            if not value.isdecimal() or len(value) > len(str(_MAX_BODY_BYTES)):
                raise VmmError(f"{what}: the answer has no length")
            if int(value) > _MAX_BODY_BYTES:
                raise VmmError(f"{what}: the answer is longer than {_MAX_BODY_BYTES} bytes")
            return int(value)
    return 0


def _object(body: bytes, what: str) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise VmmError(f"{what}: the answer is no JSON") from cause
    if not isinstance(found, dict):
        raise VmmError(f"{what}: the answer is no object")
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
