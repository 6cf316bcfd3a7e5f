"""Connections of programs to a port inside, carried by either agent: the same bytes, both ways."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.free_ports import reserve_port
from tests.support.vm import guests
from tests.support.vm.guests import Guest

from etude.envserver.guest.calls import GuestRequest
from etude.envserver.guest.channel import GuestIdentity, GuestLostError
from etude.envserver.guest.connections import GuestConnection, PortTakenError
from etude.v1 import guest_pb2

LIMIT_S = 60.0


class Pair(NamedTuple):
    """Both ends of one connection: the program's, and the host's."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: GuestConnection


@pytest.fixture(params=guests.AGENTS)
async def guest(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Guest]:
    (tmp_path / "root").mkdir()
    async with guests.guest(request.param, tmp_path / "root") as made:
        yield made


async def paired(guest: Guest, port: int) -> Pair:
    accepting = asyncio.create_task(guest.channel.accept(port))
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                return Pair(reader, writer, await accepting)
            await asyncio.sleep(0.02)


async def everything(host: GuestConnection) -> bytes:
    found = b""
    while data := await host.read():
        found += data
    return found


async def ping(guest: Guest) -> None:
    call = guest_pb2.GuestCall(stat=guest_pb2.GuestStat(path=""))
    reply = await guest.channel.call(GuestRequest(operation=call, deadline_s=LIMIT_S))
    assert reply.result.status == guest_pb2.GUEST_STATUS_OK


async def test_more_than_a_window_goes_both_ways(guest: Guest) -> None:
    pair = await paired(guest, reserve_port())
    asked, answered = b"abc" * 400_000, bytes(range(256)) * 5_000

    async def program() -> bytes:
        pair.writer.write(asked)
        pair.writer.write_eof()
        return await pair.reader.read(-1)

    async with asyncio.timeout(LIMIT_S):
        running = asyncio.create_task(program())
        assert await everything(pair.host) == asked
        await pair.host.write(answered)
        await pair.host.finish()
        await pair.host.close()
        assert await running == answered
    pair.writer.close()
    await ping(guest)


async def test_what_was_sent_arrives_although_the_host_closes_at_once(guest: Guest) -> None:
    pair = await paired(guest, reserve_port())
    answer = b"x" * 200_000

    closing = asyncio.create_task(_answered(pair.host, answer))
    async with asyncio.timeout(LIMIT_S):
        assert await pair.reader.read(-1) == answer
        pair.writer.close()
        await closing


async def _answered(host: GuestConnection, answer: bytes) -> None:
    await host.write(answer)
    await host.finish()
    await host.close()


async def test_a_closed_connection_is_closed_for_the_program_too(guest: Guest) -> None:
    pair = await paired(guest, reserve_port())

    await pair.host.close()

    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionError):
            assert await pair.reader.read(1) == b""
    with pytest.raises(ConnectionResetError):
        await pair.host.write(b"x")


async def test_a_program_that_goes_ends_its_connection(guest: Guest) -> None:
    pair = await paired(guest, reserve_port())
    pair.writer.transport.abort()

    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionError):
            while True:
                await pair.host.write(b"x" * 1000)
                await asyncio.sleep(0)
    await ping(guest)


async def test_many_connections_wait_for_their_turn(guest: Guest) -> None:
    port = reserve_port()
    first = await paired(guest, port)
    others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
    for number, (_, writer) in enumerate(others):
        writer.write(bytes([number]))
        writer.write_eof()

    seen = set()
    async with asyncio.timeout(LIMIT_S):
        for _ in others:
            host = await guest.channel.accept(port)
            seen.add((await everything(host))[0])
            await host.close()
    assert seen == set(range(40))
    await first.host.close()
    for _, writer in (*others, (first.reader, first.writer)):
        writer.close()


async def test_a_reset_ends_connections_and_the_port_stays(guest: Guest) -> None:
    port = reserve_port()
    pair = await paired(guest, port)
    waiting = asyncio.create_task(guest.channel.accept(port))
    await asyncio.sleep(0)

    await guest.channel.reset()
    await guest.channel.sync(GuestIdentity(env_id="test", token=b"other", generation=2))

    with pytest.raises(GuestLostError):
        await waiting
    with pytest.raises(ConnectionResetError):
        await pair.host.write(b"x")
    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionError):
            assert await pair.reader.read(1) == b""
    again = await paired(guest, port)
    again.writer.write(b"hello")
    async with asyncio.timeout(LIMIT_S):
        assert await again.host.read() == b"hello"
    await again.host.close()


async def test_a_port_that_is_taken_or_another_one_is_refused(guest: Guest) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        with pytest.raises(PortTakenError):
            await guest.channel.accept(squatter.getsockname()[1])
    for port in (0, 70_000):
        with pytest.raises(PortTakenError):
            await guest.channel.accept(port)
    pair = await paired(guest, reserve_port())
    with pytest.raises(PortTakenError):
        await guest.channel.accept(reserve_port())
    await pair.host.close()


async def test_nobody_is_accepted_without_the_token(guest: Guest) -> None:
    guest.channel.token = b"of another generation"

    with pytest.raises(PortTakenError, match="token"):
        await guest.channel.accept(reserve_port())


async def test_connections_leave_what_calls_were_told(guest: Guest) -> None:
    call = guest_pb2.GuestCall(exec=guest_pb2.GuestExec(shell=b"echo >> ran", timeout_ms=60_000))
    request = GuestRequest(operation=call, deadline_s=LIMIT_S)
    await guest.channel.call(request)
    port = reserve_port()
    for _ in range(300):
        pair = await paired(guest, port)
        pair.writer.close()
        await pair.host.close()

    assert (await guest.channel.call(request)).is_replayed
