"""Either agent against bytes that no host of ours sends: it does nothing until a RESET."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.vm import guests

from etude.envserver.guest import calls, frames
from etude.envserver.guest.calls import GuestRequest
from etude.envserver.guest.frames import Frame, FrameFlag, FrameKind, FrameParser
from etude.v1 import guest_pb2

PATIENCE_S = 60.0
"""Far above any honest duration on a busy machine."""


@dataclass(slots=True)
class Wire:
    """The host's end of a channel, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    parser: FrameParser = field(default_factory=lambda: FrameParser(frames.FROM_GUEST))
    _read: list[Frame] = field(default_factory=list)
    _resets: int = 0

    async def send(self, *sent: Frame | bytes) -> None:
        for each in sent:
            self.writer.write(each if isinstance(each, bytes) else each.encoded())
        await self.writer.drain()

    async def next(self) -> Frame:
        async with asyncio.timeout(PATIENCE_S):
            while not self._read:
                data = await self.reader.read(1 << 16)
                assert data, "the agent has ended"
                self._read += self.parser.feed(data)
        return self._read.pop(0)

    async def reset(self, *before: bytes) -> guest_pb2.GuestResetAck:
        self._resets += 1
        nonce = self._resets.to_bytes(16, "little")
        self._read.clear()
        self.parser.seek_ack(nonce)
        await self.send(*before, frames.reset_frame(nonce, 1))
        ack = await self.next()
        assert ack.kind is FrameKind.RESET_ACK
        return guest_pb2.GuestResetAck.FromString(frames.reset_fields(ack).body)

    async def sync(self, token: bytes, generation: int = 1) -> None:
        body = calls.sync_message(token, 0)
        body.generation = generation
        await self.send(Frame(0, FrameKind.SYNC, 0, body.SerializeToString()))
        assert (await self.next()).kind is FrameKind.SYNC_ACK

    async def result(self) -> tuple[int, guest_pb2.GuestResult]:
        while (frame := await self.next()).kind is not FrameKind.RESULT:
            pass
        return frame.flags, guest_pb2.GuestResult.FromString(frame.payload)


def call(stream: int, token: bytes = guests.TOKEN, call_id: bytes = b"", **what: object) -> bytes:
    operation = guest_pb2.GuestCall(**what)  # type: ignore[arg-type] # one operation
    request = GuestRequest(operation=operation, call_id=call_id or stream.to_bytes(16, "little"))
    return b"".join(calls.encode_call(stream, request, token))


def stat(stream: int, **given: bytes) -> bytes:
    return call(stream, stat=guest_pb2.GuestStat(path="a"), **given)


def write(stream: int, data: bytes, size: int | None = None) -> bytes:
    asked = guest_pb2.GuestWrite(
        path="new",
        size=len(data) if size is None else size,
        sha256=hashlib.sha256(data).digest(),
    )
    return call(stream, write=asked)


@pytest.fixture(params=guests.AGENTS)
async def wire(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Wire]:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"content")
    async with guests.raw(request.param, root) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        made = Wire(process.stdout, process.stdin)
        assert (await made.next()).kind is FrameKind.HELLO
        await made.reset()
        await made.sync(guests.TOKEN)
        yield made


async def test_a_call_is_answered_on_its_stream(wire: Wire) -> None:
    await wire.send(stat(1))
    flags, result = await wire.result()
    assert (flags, result.status, result.info.size) == (0, guest_pb2.GUEST_STATUS_OK, 7)


@pytest.mark.parametrize(
    "bad",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\7\0\1\0",
        b"\6\0\0\0" + b"\1\0\0\0" + b"\x77\0",
        Frame(0, FrameKind.HELLO).encoded(),
        Frame(1, FrameKind.RESULT).encoded(),
        Frame(1, FrameKind.PING).encoded(),
        Frame(0, FrameKind.CALL).encoded(),
        Frame(0, FrameKind.PING, 0, bytes(65)).encoded(),
        Frame(1, FrameKind.CREDIT, 0, b"\1").encoded(),
        Frame(1, FrameKind.SIGNAL, 0, b"\1").encoded(),
        Frame(1, FrameKind.CANCEL, 0, b"\1").encoded(),
        Frame(0, FrameKind.SYNC, 0, b"\xff").encoded(),
        Frame(0, FrameKind.RESET, 0, bytes(40)).encoded(),
    ],
)
async def test_after_a_bad_frame_only_a_reset_is_heard(wire: Wire, bad: bytes) -> None:
    await wire.send(bad, stat(1))
    ack = await wire.reset()
    assert list(ack.open) == []
    await wire.send(stat(1))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK


@pytest.mark.parametrize("length", [1, 3, 9, 20])
async def test_half_a_frame_is_completed_by_padding(wire: Wire, length: int) -> None:
    half = Frame(1, FrameKind.DATA, 0, bytes(60_000)).encoded()[:length]
    await wire.reset(half, frames.PADDING)
    await wire.send(stat(1))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK


async def test_a_reset_in_the_middle_of_data_commits_nothing(wire: Wire, tmp_path: Path) -> None:
    data = bytes(60_000)
    half = Frame(1, FrameKind.DATA, FrameFlag.END, data).encoded()[:30_000]
    # What the first RESET of the epoch rule becomes: data of the old frame.
    ack = await wire.reset(
        write(1, data) + half, frames.reset_frame(bytes(16), 9).encoded(), frames.PADDING
    )
    assert [each.stream for each in ack.open] in ([], [1])
    await wire.send(stat(1, call_id=b"another id here!"))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["a"]


async def test_an_open_call_ends_with_its_epoch(wire: Wire) -> None:
    await wire.send(write(1, b"data"))
    ack = await wire.reset()
    assert [(each.stream, each.background) for each in ack.open] == [(1, False)]
    await wire.send(stat(1, call_id=b"another id here!"))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK


async def test_nothing_of_an_old_epoch_follows_its_end(wire: Wire) -> None:
    sleep = guest_pb2.GuestExec(shell=b"sleep 300", env={"PATH": "/bin:/usr/bin"})
    await wire.send(call(1, exec=sleep))
    await wire.reset()
    pause = guest_pb2.GuestExec(shell=b"sleep 0.5", env={"PATH": "/bin:/usr/bin"})
    await wire.send(call(9, exec=pause))
    while (frame := await wire.next()).kind is not FrameKind.RESULT:
        assert frame.stream in {0, 9}
    assert frame.stream == 9


async def test_a_reset_inside_of_a_bad_frame_is_heard(wire: Wire) -> None:
    nonce = b"a nonce within it"[:16]
    inside = frames.reset_frame(nonce, 5).encoded()
    bad = (6 + len(inside)).to_bytes(4, "little") + b"\1\0\0\0" + b"\x77\0" + inside
    wire.parser.seek_ack(nonce)
    await wire.send(bad)
    assert (await wire.next()).kind is FrameKind.RESET_ACK


async def test_no_more_is_sent_than_there_is_credit_for(wire: Wire, tmp_path: Path) -> None:
    (tmp_path / "root" / "long").write_bytes(bytes(1_000_000))
    await wire.send(call(1, read=guest_pb2.GuestRead(path="long")))
    received = 0
    while received < frames.WINDOW:
        received += len((await wire.next()).payload)
    await wire.send(Frame(0, FrameKind.PING, 0, b"more?"))
    assert await wire.next() == Frame(0, FrameKind.PONG, 0, b"more?")
    await wire.send(frames.credit_frame(1, 1000))
    received += len((await wire.next()).payload)
    assert received == frames.WINDOW + 1000
    await wire.send(frames.credit_frame(1, 1_000_000))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK


async def test_credit_without_end_is_only_a_lot(wire: Wire) -> None:
    enough = [Frame(1, FrameKind.CREDIT, 0, b"\xff\xff\xff\xff")] * 5
    await wire.send(write(1, b"data"), *enough, Frame(1, FrameKind.DATA, FrameFlag.END, b"data"))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK


async def test_data_without_credit_ends_its_call(wire: Wire, tmp_path: Path) -> None:
    size = 1 << 20
    flood = [Frame(1, FrameKind.DATA, 0, bytes(60_000)).encoded()] * (size // 60_000)
    # All at once, whatever credit comes back in between; it is also less than was announced.
    end = Frame(1, FrameKind.DATA, FrameFlag.END).encoded()
    await wire.send(write(1, bytes(size)) + b"".join(flood) + end)
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_INVALID
    assert not (tmp_path / "root" / "new").exists()


async def test_data_that_is_not_what_was_announced_is_not_written(
    wire: Wire, tmp_path: Path
) -> None:
    await wire.send(write(1, b"good"), Frame(1, FrameKind.DATA, FrameFlag.END, b"evil"))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_INVALID
    await wire.send(write(2, b"good", size=5), Frame(2, FrameKind.DATA, FrameFlag.END, b"good"))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_INVALID
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["a"]


async def test_an_id_that_comes_again_gets_the_first_result(wire: Wire, tmp_path: Path) -> None:
    one, other = b"an id of 16 byte", b"other of 16 byte"
    delete = guest_pb2.GuestDelete(path="a")
    await wire.send(call(1, call_id=one, delete=delete))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK
    await wire.send(call(2, call_id=one, delete=delete))
    flags, result = await wire.result()
    assert (flags, result.status) == (FrameFlag.REPLAYED, guest_pb2.GUEST_STATUS_OK)
    await wire.reset()
    await wire.send(call(1, call_id=one, delete=delete), call(2, call_id=other, delete=delete))
    assert (await wire.result())[0] == FrameFlag.REPLAYED
    flags, result = await wire.result()
    assert (flags, result.status) == (0, guest_pb2.GUEST_STATUS_NOT_FOUND)


async def test_a_long_answer_is_replayed_without_its_data(wire: Wire, tmp_path: Path) -> None:
    (tmp_path / "root" / "long").write_bytes(bytes(5000))
    for stream, flags in ((1, 0), (2, FrameFlag.REPLAYED | FrameFlag.NOT_KEPT)):
        await wire.send(call(stream, call_id=b"i" * 16, read=guest_pb2.GuestRead(path="long")))
        seen, result = await wire.result()
        assert (seen, result.status) == (flags, guest_pb2.GUEST_STATUS_OK)


async def test_only_the_token_of_this_generation_is_admitted(wire: Wire) -> None:
    await wire.send(stat(1, token=b"stale"))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_DENIED
    await wire.sync(b"the next one", generation=2)
    # A refused call leaves no result behind: the same id is free.
    await wire.send(stat(2), stat(3, token=b"the next one", call_id=(1).to_bytes(16, "little")))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_DENIED
    flags, result = await wire.result()
    assert (flags, result.status) == (0, guest_pb2.GUEST_STATUS_OK)
    await wire.sync(b"")
    await wire.send(stat(4, token=b""))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_DENIED


async def test_a_stream_is_not_used_twice(wire: Wire) -> None:
    await wire.send(stat(5))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK
    await wire.send(stat(4, call_id=b"x" * 16), Frame(0, FrameKind.PING))
    await wire.reset()
    await wire.send(Frame(0, FrameKind.PING, 0, b"alive"))
    assert await wire.next() == Frame(0, FrameKind.PONG, 0, b"alive")


@pytest.mark.parametrize("body", [b"", b"\xff" * 20, b"\x0a\x10" + bytes(16)])
async def test_a_call_that_is_none_is_refused_alone(wire: Wire, body: bytes) -> None:
    await wire.send(Frame(1, FrameKind.CALL, 0, body), stat(2))
    assert (await wire.result())[1].status in {
        guest_pb2.GUEST_STATUS_INVALID,
        guest_pb2.GUEST_STATUS_DENIED,
    }
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK


async def test_100_000_strings_of_noise_leave_a_live_agent(wire: Wire, tmp_path: Path) -> None:
    noise = random.Random(1)
    kinds = [*FrameKind, 0x77]
    for _ in range(100):
        batch = bytearray()
        for _ in range(1000):
            payload = noise.randbytes(noise.randrange(24))
            length = noise.choice([6 + len(payload)] * 6 + [0, 5, 40, 65_542, 65_543, 2**32 - 1])
            stream, kind = noise.choice([0, 1, 2, 2**32 - 1]), noise.choice(kinds)
            batch += length.to_bytes(4, "little") + stream.to_bytes(4, "little")
            batch += bytes([kind, noise.randrange(256)]) + payload
            if noise.random() < 0.02:
                batch += frames.reset_frame(noise.randbytes(16), noise.randrange(2**64)).encoded()
        await wire.reset(bytes(batch), frames.PADDING)
    await wire.sync(guests.TOKEN)
    await wire.send(stat(1, call_id=b"after the noise!"))
    assert (await wire.result())[1].status == guest_pb2.GUEST_STATUS_OK
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["a"]
