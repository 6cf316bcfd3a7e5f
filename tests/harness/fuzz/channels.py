"""Hostile guests at the channel of a node, and at everything that asks through it."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.harness.fuzz import mutator
from tests.harness.fuzz.counts import Counts
from tests.harness.fuzz.mutator import Mutator
from typing_extensions import override

from etude.agent.patterns import GrepQuery
from etude.agent.workspace import JobError, WorkspaceError, WorkspaceLostError
from etude.common.errors import EtudeError
from etude.envserver.drivers.running_jobs import RunningJobs
from etude.envserver.guest import frames, workspace_files
from etude.envserver.guest.channel import GuestChannel, GuestIdentity
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.frames import BadFrameError, Frame, FrameKind, FrameParser
from etude.envserver.guest.jobs import GuestJobs
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.storage.folders import FolderLimits, TooLargeError
from etude.envserver.storage.trees import File
from etude.v1 import guest_pb2

PATIENCE_S = 120.0
"""Far above what anything here takes on a busy machine."""
_ROUND = 60
_LIMITS = FolderLimits(max_files=100, max_bytes=1 << 20)
_IDENTITY = GuestIdentity(env_id="fuzz", token=b"t", generation=1)
NUM_CALLS = 19
"""What is asked for at once."""


class Ask(NamedTuple):
    """A call that waits for the guest."""

    answer: Coroutine[None, None, object]
    expected: tuple[type[EtudeError], ...]
    """What it may raise."""


class Counting(FrameParser):
    """A parser that knows how much it has taken."""

    num_taken = 0
    num_refused = 0

    @override
    def feed(self, data: bytes) -> Iterator[Frame]:
        try:
            for frame in super().feed(data):
                self.num_taken += 1
                yield frame
        except BadFrameError:
            self.num_refused += 1
            raise


def run(seed: int, num_frames: int) -> Counts:
    """So many frames, each round to a channel of its own."""
    return asyncio.run(_run(seed, num_frames))


async def _run(seed: int, num_frames: int) -> Counts:
    counts, number, recorded = Counts(), 0, mutator.from_guest()
    while counts.frames < num_frames:
        number += 1
        hostile = Mutator(
            seed=f"channel {seed} {number}", frames=recorded, wildness=0.02, answers=True
        )
        pieces = [hostile.piece(NUM_CALLS + 3) for _ in range(_ROUND)]
        begin = hostile.piece(1) if number % 7 == 0 else b""
        counts += await Round(pieces, begin).play()
    return counts


@dataclass(slots=True)
class Round:
    """One channel to one guest, which begins like an honest one."""

    pieces: Sequence[bytes]
    begin: bytes = b""
    """What it says before its answer to the RESET."""
    counts: Counts = field(default_factory=Counts)

    @property
    def said(self) -> bytes:
        """All that is not honest."""
        return self.begin + b"".join(self.pieces)

    async def play(self) -> Counts:
        """Begin, ask for everything, let the guest answer as it likes, and hang up."""
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)  # noqa: FBT003 - the only way to say it
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        parser = Counting(frames.FROM_GUEST)
        channel = GuestChannel(reader, writer, ack_timeout_s=PATIENCE_S, _parser=parser)
        jobs = RunningJobs(())
        channel.on_event = jobs.add_event
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._play(channel, theirs)
        except TimeoutError:
            self.counts.hang("somebody waits after the guest has gone", self.said)
        finally:
            theirs.close()
            await channel.close()
        self.counts.frames += parser.num_taken + parser.num_refused
        self.counts.refused += parser.num_refused
        return self.counts

    async def _play(self, channel: GuestChannel, theirs: socket.socket) -> None:
        guest = asyncio.create_task(self._guest(theirs), name="hostile guest")
        try:
            await channel.reset()
            await channel.sync(_IDENTITY)
        except EtudeError:
            await _hung_up(guest, theirs)
            return
        asks = _asks(channel)
        waiting = (each.answer for each in asks)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        await _hung_up(guest, theirs)
        for ask, answer in zip(asks, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, ask.expected):
                self.counts.crash(f"{ask.answer} raises {answer!r}", self.said)

    async def _guest(self, theirs: socket.socket) -> None:
        loop, parser, num_calls, has_spoken = asyncio.get_running_loop(), _begun(), 0, False
        with contextlib.suppress(OSError):  # the node has hung up
            await loop.sock_sendall(theirs, self.begin)
            while data := await loop.sock_recv(theirs, 1 << 18):
                for frame in parser.feed(data):
                    num_calls += frame.kind is FrameKind.CALL
                    await loop.sock_sendall(theirs, _honest(frame))
                if num_calls >= NUM_CALLS and not has_spoken:
                    has_spoken = True
                    await loop.sock_sendall(theirs, b"".join(self.pieces))
                    theirs.shutdown(socket.SHUT_WR)

    def _unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        why = context.get("exception") or context["message"]
        self.counts.crash(f"nobody handles {why!r}", self.said)


def _asks(channel: GuestChannel) -> list[Ask]:
    """One of every kind that a node makes, and the errors that it understands."""
    commands, jobs = GuestCommands(channel=channel), GuestJobs(channel=channel)
    workspace = GuestWorkspace(channel, commands.run, jobs=jobs)
    by_policy = (WorkspaceError, WorkspaceLostError)
    by_guest = (WorkspaceLostError, TooLargeError)
    of_jobs = (*by_policy, JobError)
    return [
        Ask(workspace.read("a.py"), by_policy),
        Ask(workspace.write("b.py", b"x" * 100), by_policy),
        Ask(workspace.stat("a.py"), by_policy),
        Ask(workspace.list(""), by_policy),
        Ask(workspace.glob("**/*.py"), by_policy),
        Ask(workspace.grep(GrepQuery(pattern="a+")), by_policy),
        Ask(workspace.hashes(), by_policy),
        Ask(workspace.delete("c"), by_policy),
        Ask(commands.run("true", 60.0), by_policy),
        Ask(jobs.start("sleep 1", timeout_s=None), of_jobs),
        Ask(jobs.state(1), of_jobs),
        Ask(jobs.output(1, offset=0, size=1000), of_jobs),
        Ask(jobs.send(1, b"x", end=False), of_jobs),
        Ask(jobs.kill(1), of_jobs),
        Ask(workspace_files.mark_workspace(channel, "m"), by_guest),
        Ask(workspace_files.changed_files(channel, "m", _LIMITS), by_guest),
        Ask(workspace_files.workspace_content(channel, _LIMITS), by_guest),
        Ask(workspace_files.write_tree(channel, {"a": File(b"a")}, root="/r"), by_guest),
        Ask(workspace_files.workspace_change(channel, b"", _LIMITS), by_guest),
    ]


async def _hung_up(guest: "asyncio.Task[None]", theirs: socket.socket) -> None:
    guest.cancel()
    await asyncio.wait([guest])
    theirs.close()


def _begun() -> FrameParser:
    parser = FrameParser(frames.FROM_HOST)
    parser.seek_reset()
    return parser


def _honest(frame: Frame) -> bytes:
    if frame.kind is FrameKind.RESET:
        asked = frames.reset_fields(frame)
        return frames.reset_ack_frame(asked.nonce, asked.epoch, b"").encoded()
    if frame.kind is FrameKind.SYNC:
        generation = guest_pb2.GuestSync.FromString(frame.payload).generation
        ack = guest_pb2.GuestSyncAck(generation=generation)
        return Frame(0, FrameKind.SYNC_ACK, 0, ack.SerializeToString()).encoded()
    return b""
