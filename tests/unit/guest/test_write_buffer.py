"""What a node says to a guest in one turn of its loop arrives in one piece, in order."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.envserver.guest.channel import WriteBuffer

SIZES = st.lists(st.sampled_from((1, 100, 5_000, 16 << 10, 40_000)), max_size=5)


class _Wired(NamedTuple):
    outbox: WriteBuffer
    guest: socket.socket


@contextlib.asynccontextmanager
async def _wired() -> AsyncIterator[_Wired]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    _, writer = await asyncio.open_unix_connection(sock=ours)
    with theirs:
        yield _Wired(WriteBuffer(writer), theirs)
        writer.close()
        await writer.wait_closed()


async def _all_of(guest: socket.socket) -> bytes:
    reader, writer = await asyncio.open_unix_connection(sock=guest)
    said = await reader.read()
    writer.close()
    return said


@settings(deadline=None, max_examples=15)
@given(turns=st.lists(SIZES, max_size=3))
async def test_every_byte_arrives_in_the_order_in_which_it_was_put(
    turns: list[list[int]],
) -> None:
    pieces = [[random.randbytes(size) for size in sizes] for sizes in turns]
    async with _wired() as wired:
        listening = asyncio.create_task(_all_of(wired.guest.dup()))
        for turn in pieces:
            for piece in turn:
                wired.outbox.write(piece)
            await asyncio.sleep(0)
        wired.outbox.close()
        assert await listening == b"".join(piece for turn in pieces for piece in turn)


async def test_what_is_said_in_one_turn_leaves_in_one_piece() -> None:
    async with _wired() as wired:
        for _ in range(10):
            wired.outbox.write(b"order")
        with pytest.raises(BlockingIOError):
            wired.guest.recv(1, socket.MSG_DONTWAIT)
        await asyncio.sleep(0)
        assert wired.guest.recv(1000) == 10 * b"order"
        assert wired.outbox.num_unsent == 0


async def test_much_is_written_before_the_turn_ends() -> None:
    async with _wired() as wired:
        wired.outbox.write(b"order")
        wired.outbox.write(bytes(17 << 10))
        assert len(wired.guest.recv(1 << 20, socket.MSG_DONTWAIT)) == 5 + (17 << 10)


async def test_what_a_guest_does_not_take_is_counted() -> None:
    async with _wired() as wired:
        for size in (1, 8 << 10, 4 << 20):
            before = wired.outbox.num_unsent
            wired.outbox.write(bytes(size))
            assert wired.outbox.num_unsent <= before + size
        assert wired.outbox.num_unsent > 1 << 20
        wired.outbox.writer.transport.abort()
        wired.outbox.write(b"to nobody")
        wired.outbox.flush()
        assert wired.outbox.num_unsent == 0
