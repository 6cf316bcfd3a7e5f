"""The host's end of a channel, when the guest is hostile, silent or gone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.support.vm import guests

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.guest import frames
from etude.envserver.guest.calls import GuestRequest, ReplyTooLargeError
from etude.envserver.guest.channel import GuestChannel, GuestIdentity, GuestLostError
from etude.envserver.guest.connections import PortTakenError
from etude.envserver.guest.frames import Frame, FrameFlag, FrameKind, FrameParser
from etude.v1 import guest_pb2

Answer = Callable[[Frame], bytes]
"""What a scripted guest does with a frame of the host."""
STAT = GuestRequest(
    operation=guest_pb2.GuestCall(stat=guest_pb2.GuestStat(path="a")), deadline_s=60
)
OK = guest_pb2.GuestResult(status=guest_pb2.GUEST_STATUS_OK).SerializeToString()


def honest(frame: Frame) -> bytes:
    """A guest that knows nothing but how to begin, and says yes to everything."""
    match frame.kind:
        case FrameKind.RESET:
            asked = frames.reset_fields(frame)
            return frames.reset_ack_frame(asked.nonce, asked.epoch, b"").encoded()
        case FrameKind.SYNC:
            asked_sync = guest_pb2.GuestSync.FromString(frame.payload)
            ack = guest_pb2.GuestSyncAck(generation=asked_sync.generation)
            return Frame(0, FrameKind.SYNC_ACK, 0, ack.SerializeToString()).encoded()
        case FrameKind.PING:
            return frame._replace(kind=FrameKind.PONG).encoded()
        case FrameKind.CALL:
            return Frame(frame.stream, FrameKind.RESULT, 0, OK).encoded()
        case _:
            return b""


def answering(kind: FrameKind, with_: Callable[[Frame], bytes | Frame]) -> Answer:
    """Honest but for one kind of frame."""

    def answer(frame: Frame) -> bytes:
        if frame.kind is not kind:
            return honest(frame)
        said = with_(frame)
        return said if isinstance(said, bytes) else said.encoded()

    return answer


@contextlib.asynccontextmanager
async def scripted(
    folder: Path, answer: Answer, *, first: bytes = b""
) -> AsyncIterator[GuestChannel]:
    """A channel to a guest that answers each frame as the test says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser(frames.FROM_HOST)
        parser.seek_reset()
        writer.write(first)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                for frame in parser.feed(data):
                    writer.write(answer(frame))
                await writer.drain()
        writer.close()

    path = str(folder / "guest")
    async with await asyncio.start_unix_server(serve, path):
        reader, writer = await asyncio.open_unix_connection(path)
        # Its first answer counts: these guests do not look for a RESET behind padding.
        channel = GuestChannel(reader, writer, ack_timeout_s=60)
        try:
            yield channel
        finally:
            await channel.close()


async def begun(channel: GuestChannel) -> None:
    await channel.reset()
    await channel.sync(GuestIdentity(env_id="e", token=b"t", generation=1))


async def lost(call: Awaitable[object]) -> str:
    with pytest.raises(GuestLostError) as caught:
        await call
    return str(caught.value)


async def test_whatever_came_before_the_answer_to_a_reset_is_discarded(tmp_path: Path) -> None:
    noise = frames.reset_ack_frame(bytes(16), 1, b"").encoded() + b"\xff" * 70_000 + b"half"
    async with scripted(tmp_path, honest, first=noise) as channel:
        await begun(channel)
        assert (await channel.call(STAT)).result.status == guest_pb2.GUEST_STATUS_OK
        assert await channel.ping()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (lambda f: Frame(f.stream + 1, FrameKind.RESULT, 0, OK), "never opened"),
        (lambda f: Frame(f.stream + 9, FrameKind.DATA, 0, b"x"), "never opened"),
        (lambda f: Frame(2**32 - 1, FrameKind.CREDIT, 0, b"\xff" * 4), "never opened"),
        (lambda f: frames.reset_ack_frame(b"n" * 16, 1, b""), "unexpected"),
        (lambda f: Frame(0, FrameKind.SYNC_ACK), "unexpected"),
        (lambda f: Frame(f.stream, FrameKind.RESULT, 0, b"\xff"), "broke its channel"),
        (lambda f: Frame(0, FrameKind.EVENT, 0, b"\xff"), "broke its channel"),
        (lambda f: Frame(f.stream, FrameKind.CALL), "type 0x10"),
        (lambda f: b"\0\0\0\0", "a frame of 0 bytes"),
        (lambda f: b"\xff\xff\xff\x7f", "a frame of 2147483647 bytes"),
    ],
)
async def test_what_no_agent_of_ours_sends_ends_the_channel(
    tmp_path: Path, answer: Callable[[Frame], bytes | Frame], named: str
) -> None:
    async with scripted(tmp_path, answering(FrameKind.CALL, answer)) as channel:
        await begun(channel)
        assert named in await lost(channel.call(STAT))
        assert channel.is_lost
        assert named in await lost(channel.call(STAT))
        assert named in await lost(channel.reset())


async def test_more_than_the_caller_wants_to_hold_is_refused(tmp_path: Path) -> None:
    def answer(frame: Frame) -> bytes:
        return Frame(frame.stream, FrameKind.DATA, 0, bytes(1000)).encoded() * 3

    async with scripted(tmp_path, answering(FrameKind.CALL, answer)) as channel:
        await begun(channel)
        small = GuestRequest(operation=STAT.operation, max_bytes=2000, deadline_s=60)
        with pytest.raises(ReplyTooLargeError):
            await channel.call(small)
        assert not channel.is_lost
        assert await channel.ping()


async def test_credit_without_end_does_not_overflow(tmp_path: Path) -> None:
    sent = 0

    def answer(frame: Frame) -> bytes:
        nonlocal sent
        if frame.kind is FrameKind.CALL:
            return Frame(frame.stream, FrameKind.CREDIT, 0, b"\xff" * 4).encoded() * 10
        if frame.kind is FrameKind.DATA:
            sent += len(frame.payload)
            if frame.flags & FrameFlag.END:
                return Frame(frame.stream, FrameKind.RESULT, 0, OK).encoded()
        return honest(frame)

    async with scripted(tmp_path, answer) as channel:
        await begun(channel)
        operation = guest_pb2.GuestCall(write=guest_pb2.GuestWrite(path="a", size=1 << 20))
        await channel.call(GuestRequest(operation=operation, data=bytes(1 << 20), deadline_s=60))
    assert sent == 1 << 20


async def test_a_guest_without_an_answer_to_two_resets_is_lost(tmp_path: Path) -> None:
    seen = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 18):
            seen.extend(data)
        writer.close()

    path = str(tmp_path / "guest")
    async with await asyncio.start_unix_server(serve, path):
        reader, writer = await asyncio.open_unix_connection(path)
        channel = GuestChannel(reader, writer, ack_timeout_s=0.05, last_ack_timeout_s=0.5)
        assert "answers no RESET" in await lost(channel.reset())
        await channel.close()
    assert seen.count(frames.MAGIC) == 2


async def test_a_reset_that_was_swallowed_by_half_a_frame_is_sent_again(tmp_path: Path) -> None:
    seen = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser(frames.FROM_HOST)
        # Half a frame of an earlier host is in the guest's buffer.
        assert list(parser.feed(Frame(1, FrameKind.DATA, 0, bytes(5000)).encoded()[:100])) == []
        while data := await reader.read(1 << 18):
            seen.extend(data)
            while True:
                try:
                    for frame in parser.feed(data):
                        writer.write(honest(frame))
                except frames.BadFrameError:
                    parser.seek_reset()
                    data = b""
                else:
                    break
        writer.close()

    path = str(tmp_path / "guest")
    async with await asyncio.start_unix_server(serve, path):
        reader, writer = await asyncio.open_unix_connection(path)
        channel = GuestChannel(reader, writer, ack_timeout_s=0.05, last_ack_timeout_s=60)
        await begun(channel)
        await channel.close()
    assert seen.count(frames.MAGIC) == 2
    assert bytes(frames.MAX_LENGTH) in seen


async def test_a_call_without_an_answer_loses_the_guest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GRACE_S", "CANCEL_S"):
        monkeypatch.setattr(f"etude.envserver.guest.channel.{name}", 0.05)
    seen: list[FrameKind] = []

    def answer(frame: Frame) -> bytes:
        seen.append(frame.kind)
        return b""

    async with scripted(tmp_path, answering(FrameKind.CALL, answer)) as channel:
        await channel.reset()
        hurried = GuestRequest(operation=STAT.operation, deadline_s=0.05)
        assert "no answer" in await lost(channel.call(hurried))


async def test_a_caller_that_goes_away_cancels_its_call_alone(tmp_path: Path) -> None:
    cancelled = asyncio.Event()
    opened = asyncio.Event()

    def answer(frame: Frame) -> bytes:
        if frame.kind is FrameKind.CALL and frame.stream == 1:
            opened.set()
            return b""
        if frame.kind is FrameKind.CANCEL:
            cancelled.set()
            # A result that comes too late is nobody's.
            return Frame(frame.stream, FrameKind.RESULT, 0, OK).encoded()
        return honest(frame)

    async with scripted(tmp_path, answer) as channel:
        await begun(channel)
        task = asyncio.create_task(channel.call(STAT))
        await opened.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await cancelled.wait()
        assert (await channel.call(STAT)).result.status == guest_pb2.GUEST_STATUS_OK


async def test_open_calls_end_when_the_guest_does(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser(frames.FROM_HOST)
        while data := await reader.read(1 << 18):
            for frame in parser.feed(data):
                if frame.kind is FrameKind.CALL:
                    writer.close()
                    return
                writer.write(honest(frame))

    path = str(tmp_path / "guest")
    async with await asyncio.start_unix_server(serve, path):
        reader, writer = await asyncio.open_unix_connection(path)
        channel = GuestChannel(reader, writer, ack_timeout_s=60)
        await begun(channel)
        results = await asyncio.gather(
            *(channel.call(STAT) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(result, WorkspaceLostError) for result in results)
        await channel.close()


async def test_a_clone_that_did_not_become_itself_is_not_used(tmp_path: Path) -> None:
    failed = guest_pb2.GuestSyncAck(generation=1, failed=["clock: EPERM"]).SerializeToString()
    answer = answering(FrameKind.SYNC, lambda _: Frame(0, FrameKind.SYNC_ACK, 0, failed))
    async with scripted(tmp_path, answer) as channel:
        await channel.reset()
        identity = GuestIdentity(env_id="e", token=b"t", generation=1)
        assert "clock: EPERM" in await lost(channel.sync(identity))


async def test_a_reset_ends_what_is_open_and_the_channel_goes_on(tmp_path: Path) -> None:
    is_first = True

    def once(frame: Frame) -> bytes:
        nonlocal is_first
        if frame.kind is FrameKind.CALL and is_first:
            is_first = False
            return b""
        return honest(frame)

    async with scripted(tmp_path, once) as channel:
        await begun(channel)
        task = asyncio.create_task(channel.call(STAT))
        await guests.until(lambda: bool(channel._open))
        await channel.reset()
        assert "was reset" in await lost(task)
        assert (await channel.call(STAT)).result.status == guest_pb2.GUEST_STATUS_OK


def data(frame: Frame, size: int, *, channel: int = 1, flags: int = 0) -> bytes:
    return Frame(frame.stream, FrameKind.DATA, channel << 1 | flags, b"x" * size).encoded()


@pytest.mark.parametrize(
    "said",
    [
        lambda call: data(call, 1, channel=0),
        lambda call: data(call, 0, flags=FrameFlag.END) + data(call, 1),
        lambda call: b"".join(data(call, 60_000) for _ in range(5)),
        lambda call: Frame(call.stream, FrameKind.RESULT, 0, b"\xff").encoded(),
    ],
    ids=["another channel", "after the end", "more than its credit", "no result"],
)
async def test_a_guest_that_breaks_the_rules_of_a_connection_is_lost(
    tmp_path: Path, said: Callable[[Frame], bytes]
) -> None:
    async with scripted(tmp_path, answering(FrameKind.CALL, said)) as channel:
        await channel.reset()
        with contextlib.suppress(GuestLostError):
            connection = await channel.accept(3128)
            with contextlib.suppress(ConnectionResetError):
                for _ in range(9):
                    await connection.read()
                    await asyncio.sleep(0.01)
        await guests.until(lambda: channel.is_lost)


async def test_no_credit_makes_the_host_hold_more_than_it_has(tmp_path: Path) -> None:
    credit = (1 << 32) - 1

    def said(call: Frame) -> bytes:
        return data(call, 0) + b"".join(
            frames.credit_frame(call.stream, credit).encoded() * 3 for _ in "a"
        )

    async with scripted(tmp_path, answering(FrameKind.CALL, said)) as channel:
        await channel.reset()
        connection = await channel.accept(3128)
        await connection.write(b"x" * 1_000_000)
        await connection.close()
        assert not channel.is_lost


async def test_a_guest_may_end_a_connection_that_it_never_had(tmp_path: Path) -> None:
    async with scripted(tmp_path, honest) as channel:
        await channel.reset()
        with pytest.raises(PortTakenError):
            await channel.accept(3128)
        assert not channel.is_lost
