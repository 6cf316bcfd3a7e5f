"""HTTP server: other machines are served encrypted alone, and no header holds a connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from starlette.types import Receive, Scope, Send

from etude.common import http_server
from etude.common.errors import UserError
from etude.common.http_server import (
    HeadLimitProtocol,
    HttpServer,
    http_config,
    open_listener,
    require_tls,
)
from etude.common.tls.credentials import Credentials
from etude.common.tls.transport import TransportSecurity


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the request with nothing."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server."""
    with open_listener("127.0.0.1", 0) as listener:
        server = HttpServer(http_config(answer))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        yield reader, writer
        writer.close()
        server.should_exit = True
        await serving


def test_other_machines_are_not_served_in_the_clear() -> None:
    with pytest.raises(UserError, match="not be encrypted"):
        require_tls("0.0.0.0", 1, None, "what is served")
    require_tls("127.0.0.1", 1, None, "what is served")


def test_certificates_of_rpc_do_not_open_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    security = TransportSecurity(credentials=cast("Credentials", object()))
    monkeypatch.setattr(http_server, "process_security", lambda: security)
    with pytest.raises(UserError, match="not be encrypted"):
        require_tls("0.0.0.0", 1, None, "what is served")
    require_tls("127.0.0.1", 1, None, "what is served")


def test_a_folder_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tls\.key"):
        require_tls("127.0.0.1", 1, tmp_path, "what is served")
    (tmp_path / "tls.key").touch()
    require_tls("0.0.0.0", 1, tmp_path, "what is served")


async def test_a_request_whose_headers_do_not_end_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HeadLimitProtocol, "head_s", 0.05)
    async with connection() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nx-slow: ")
        assert await reader.read() == b""


async def test_a_second_request_of_a_connection_has_the_same_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HeadLimitProtocol, "head_s", 0.5)
    async with connection() as (reader, writer):
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert b"204" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET / HTTP/1.1\r\n")
        assert await reader.read() == b""


async def test_a_request_without_a_version_is_refused() -> None:
    async with connection() as (reader, writer):
        writer.write(b"GET /\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")


async def test_headers_that_are_too_large_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_HEAD_BYTES", 1_000)
    async with connection() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x-many: 1\r\n" * 200)
        assert await reader.read() == b""
