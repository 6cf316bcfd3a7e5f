"""The first words on a guest's socket, from monitors that were taken over."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import vm


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(0)
    yield ours, theirs
    ours.close()
    theirs.close()


Ends = tuple[socket.socket, socket.socket]


async def test_what_follows_the_answer_is_left_for_the_channel(ends: Ends) -> None:
    ours, theirs = ends
    theirs.send(b"OK 1073741824\nfirst frame")
    await vm._greet(ours)
    assert theirs.recv(100) == b"CONNECT 1024\n"
    assert await asyncio.get_running_loop().sock_recv(ours, 100) == b"first frame"


@pytest.mark.parametrize(
    "answer",
    [b"", b"OK", b"OK \n", b"ok 1\n", b"OK 1 2\n", b"OK x\n", b"\n", b"OK " + b"1" * 4096],
)
async def test_what_is_no_answer_is_no_connection(ends: Ends, answer: bytes) -> None:
    ours, theirs = ends
    theirs.send(answer)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(VmmError, match=r"has no listener|answers CONNECT with"):
        await vm._greet(ours)
