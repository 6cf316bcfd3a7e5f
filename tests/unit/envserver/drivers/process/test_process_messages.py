"""Messages to the sandbox server arrive whole and in order, however full the socket."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from etude.envserver.drivers.process.messages import ServerOutbox

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(0)
        theirs.settimeout(0)
        yield ours, theirs


async def test_messages_that_meet_a_full_socket_all_arrive(ends: Ends) -> None:
    ours, theirs = ends
    lost: list[str] = []
    outbox = ServerOutbox(ours, lost.append)
    sent = [str(number).encode().ljust(100_000) for number in range(20)]
    for message in sent:
        outbox.send(message)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        assert [await loop.sock_recv(theirs, 1 << 18) for _ in sent] == sent
    outbox.close()
    assert not lost


async def test_whoever_waits_learns_that_the_server_has_ended(ends: Ends) -> None:
    ours, theirs = ends
    lost = asyncio.get_running_loop().create_future()
    outbox = ServerOutbox(ours, lost.set_result)
    for _ in range(20):
        outbox.send(b" " * 100_000)
    theirs.close()
    async with asyncio.timeout(10):
        assert "does not listen" in await lost
