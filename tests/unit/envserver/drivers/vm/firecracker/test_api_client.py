"""Firecracker's API, against processes that were taken over."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker.api_client import FirecrackerApi


class Monitor:
    """Answers each connection with the same bytes, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer, self.asked = b"", b""
        self.ends = True
        self._tasks: list[asyncio.Task[None]] = []

    def dial(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        theirs.settimeout(0)
        self._tasks.append(asyncio.create_task(self._serve(theirs)))
        return ours

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            self.asked = await loop.sock_recv(connection, 1 << 16)
            await loop.sock_sendall(connection, self.answer)
            if not self.ends:
                await asyncio.Event().wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def monitor() -> AsyncIterator[Monitor]:
    made = Monitor()
    yield made
    await made.close()


async def test_a_request_has_a_length_and_an_answer_its_object(monitor: Monitor) -> None:
    monitor.answer = b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"state":"a"}'
    assert await FirecrackerApi(monitor.dial).get("/") == {"state": "a"}
    monitor.answer = b"HTTP/1.1 204 No Content\r\n\r\n"
    await FirecrackerApi(monitor.dial).put("/vm", {"state": "Paused"})
    head, _, body = monitor.asked.partition(b"\r\n\r\n")
    assert head.startswith(b"PUT /vm HTTP/1.1\r\nHost: localhost\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert body == b'{"state": "Paused"}'


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"fault_message":"no such thing"}', "no such thing"),
        (b'{"fault_message":"' + b"x" * 5000 + b'"}', "x" * 500),
        (b"{}", "refused with 400"),
        (b"no JSON", "refused with 400"),
    ],
)
async def test_a_refusal_says_what_the_monitor_said(
    monitor: Monitor, body: bytes, what: str
) -> None:
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\n\r\n"
    monitor.answer = head.encode() + body
    with pytest.raises(VmmError) as caught:
        await FirecrackerApi(monitor.dial).put("/vm", {})
    assert str(caught.value) == f"PUT /vm: {what}"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno",
        b"SSH-2.0\r\n\r\n",
        b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    ],
)
async def test_an_answer_that_is_none_is_an_error(monitor: Monitor, answer: bytes) -> None:
    monitor.answer = answer
    with pytest.raises(VmmError, match="GET /"):
        await FirecrackerApi(monitor.dial).get("/")


async def test_silence_ends(monitor: Monitor) -> None:
    monitor.ends = False
    with pytest.raises(VmmError, match=r"no answer in 0\.05 s"):
        await FirecrackerApi(monitor.dial).put("/vm", {}, limit_s=0.05)
