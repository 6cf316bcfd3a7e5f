"""python -m tests.harness.fuzz.recording: keep frames of every shape that a golden run sends."""

import asyncio
import shlex
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

from google.protobuf.message import Message
from tests.harness.fuzz import mutator
from tests.harness.golden.calls import ALL, Need
from tests.harness.golden.transcript import Stage, play
from tests.harness.golden.tree import TREE
from tests.support.vm import guests

from etude.envserver.guest import frames, workspace_files
from etude.envserver.guest.channel import GuestChannel, GuestIdentity
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.frames import Frame, FrameKind, FrameParser
from etude.envserver.guest.jobs import GuestJobs
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.storage import folders
from etude.envserver.storage.folders import FolderLimits
from etude.v1 import guest_pb2

_EACH = 3
"""Frames of one shape that are kept."""
_MAX_BYTES = 2_000
_LIMITS = FolderLimits(max_files=10_000, max_bytes=64 << 20)
_MESSAGES: dict[FrameKind, type[Message]] = {
    FrameKind.CALL: guest_pb2.GuestCall,
    FrameKind.RESULT: guest_pb2.GuestResult,
    FrameKind.EVENT: guest_pb2.GuestEvent,
}


async def record(folder: Path) -> tuple[Path, Path]:
    """Play the golden run on the agent in Go; the bytes of guest and host are in two files."""
    root, ways = folder / "root", (folder / "guest", folder / "host")
    folders.write_tree(root, TREE, folders.current_owner())
    from_guest, from_host = (shlex.quote(str(way)) for way in ways)
    agent = [*guests.command("go"), "--stdio", "--root", root, "--state", folder / "state"]
    line = f"tee {from_host} | {shlex.join(map(str, agent))} | tee {from_guest}"
    process = await asyncio.create_subprocess_shell(line, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    channel = GuestChannel(process.stdout, process.stdin, ack_timeout_s=guests.START_S)
    await channel.hello(timeout_s=guests.START_S)
    await channel.reset()
    await channel.sync(GuestIdentity(env_id="golden", token=guests.TOKEN, generation=1))
    await channel.ping()
    commands, jobs = GuestCommands(channel=channel), GuestJobs(channel=channel)
    await workspace_files.mark_workspace(channel, "m")
    await play(Stage(GuestWorkspace(channel, commands.run, jobs=jobs), ALL - {Need.WALL}), TREE)
    await workspace_files.changed_files(channel, "m", _LIMITS)
    await channel.reset()
    await channel.close()
    await process.wait()
    return ways


def kept(data: bytes, kinds: frozenset[FrameKind]) -> Iterator[Frame]:
    """A few frames of every shape."""
    seen: Counter[Hashable] = Counter()
    for frame in FrameParser(kinds).feed(data):
        if len(frame.payload) > _MAX_BYTES:
            continue
        shape = _shape(frame)
        seen[shape] += 1
        if seen[shape] <= _EACH:
            yield frame


def _shape(frame: Frame) -> Hashable:
    known = _MESSAGES.get(frame.kind)
    if known is None:
        return frame.kind, frame.flags, len(frame.payload).bit_length()
    message = known.FromString(frame.payload)
    numbers = []
    if isinstance(message, guest_pb2.GuestResult):
        numbers = [str(message.status), str(message.fault)]
    return frame.kind, frame.flags, *numbers, *_names(message)


def _names(message: Message) -> Iterator[str]:
    for field, value in message.ListFields():
        yield field.name
        if isinstance(value, Message):
            yield from _names(value)


def _write(path: Path, found: Iterable[Frame]) -> str:
    data = [frame.encoded() for frame in found]
    path.write_bytes(b"".join(data))
    return f"{path}: {len(data)} frames, {path.stat().st_size} bytes\n"


def main() -> None:
    """Write both files anew."""
    mutator.CORPUS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        guest, host = asyncio.run(record(Path(folder)))
        said = guest.read_bytes(), host.read_bytes()
    sys.stdout.write(_write(mutator.GUEST, kept(said[0], frames.FROM_GUEST)))
    sys.stdout.write(_write(mutator.HOST, kept(said[1], frames.FROM_HOST)))


if __name__ == "__main__":
    main()
