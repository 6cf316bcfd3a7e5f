"""One gVisor container: start, restore, calls, checkpoint, end; found again by a later process."""

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from typing_extensions import override

from etude.common import atomic
from etude.common.errors import CorruptError
from etude.envserver.drivers import process_identity
from etude.envserver.drivers.gvisor import bundle
from etude.envserver.drivers.gvisor.runsc import RunscClient, RunscError, tail
from etude.envserver.drivers.process_identity import ProcessId
from etude.envserver.drivers.running_jobs import RunningJobs
from etude.envserver.guest.calls import GuestCaller, GuestReply, GuestRequest
from etude.envserver.guest.channel import GuestChannel, GuestIdentity, GuestLostError
from etude.v1 import guest_pb2

_TO, _FROM = "to-agent", "from-agent"


def make_pipes(folder: Path) -> tuple[int, int]:
    """Create pipes in a folder, opened as a container's standard input and output."""
    for name in (_TO, _FROM):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name, 0o600)
    to_agent = os.open(folder / _TO, os.O_RDWR | os.O_CLOEXEC)
    return to_agent, os.open(folder / _FROM, os.O_RDWR | os.O_CLOEXEC)


async def connect_agent(folder: Path) -> GuestChannel:
    """Open a channel over the pipes of a running container."""
    loop = asyncio.get_running_loop()
    flags = os.O_NONBLOCK | os.O_CLOEXEC
    incoming = os.fdopen(os.open(folder / _FROM, os.O_RDONLY | flags), "rb", 0)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), incoming)
    outgoing = os.fdopen(os.open(folder / _TO, os.O_WRONLY | flags), "wb", 0)
    # A protocol of its own, for the pipe's end only.
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), outgoing
    )
    return GuestChannel(reader, asyncio.StreamWriter(transport, protocol, None, loop))


RECORD = "container.json"
CONFIG = "config.json"
HELLO_S = 60.0
_TOKEN_BYTES = 32
_NAME = "etude-"


@dataclass(slots=True, eq=False)
class GvisorContainer(GuestCaller):
    """A container; its folder is also its bundle."""

    runsc: RunscClient
    folder: Path
    name: str
    process: ProcessId
    """Process of its kernel."""
    generation: int
    _channel: GuestChannel | None = None
    _jobs: RunningJobs = field(default_factory=RunningJobs)
    _is_reset: bool = False
    _dialling: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def start(
        cls,
        runsc: RunscClient,
        folder: Path,
        root: Path,
        *,
        memory_mib: int,
        has_workspace: bool = False,
    ) -> Self:
        """Start a container of an image's root in an empty folder; its agent answers."""
        spec = bundle.spec(root, memory_mib=memory_mib, has_workspace=has_workspace)
        (folder / CONFIG).write_text(json.dumps(spec))
        made = await cls._start(runsc, folder, ("run",), generation=1)
        try:
            channel = made._channel = await connect_agent(folder)
            await channel.hello(timeout_s=HELLO_S)
            await made._reset(channel)
        except BaseException:
            await made.destroy()
            raise
        return made

    @classmethod
    async def restore(
        cls, runsc: RunscClient, folder: Path, image: Path, *, config: bytes, generation: int
    ) -> Self:
        """Restore a container from a checkpoint in an empty folder; its agent answers."""
        (folder / CONFIG).write_bytes(config)
        words = ("restore", "-image-path", str(image))
        made = await cls._start(runsc, folder, words, generation=generation)
        try:
            await made._connected()
        except BaseException:
            await made.destroy()
            raise
        return made

    @classmethod
    def load(cls, runsc: RunscClient, folder: Path) -> Self | None:
        """Load the record of an earlier process's container, running or not; None if there is none.

        Raises:
            CorruptError: it cannot be read.
        """
        try:
            said = json.loads((folder / RECORD).read_bytes())
            process = ProcessId(**said["process"])
            return cls(runsc, folder, str(said["name"]), process, int(said["generation"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as cause:
            raise CorruptError(f"{folder / RECORD}: {cause}") from cause

    @property
    def is_lost(self) -> bool:
        if self._channel is not None and self._channel.is_lost:
            return True
        return process_identity.identify(self.process.pid) != self.process

    @property
    def has_jobs(self) -> bool:
        return not self._is_reset or bool(self._jobs.running)

    @property
    def config(self) -> bytes:
        """Config of the bundle, needed to restore a checkpoint."""
        return (self.folder / CONFIG).read_bytes()

    @override
    async def call(self, request: GuestRequest) -> GuestReply:
        channel = await self._connected()
        with self._jobs.span_call(request.operation):
            reply = await channel.call(request)
            self._jobs.add_answer(request.operation, reply.result)
        return reply

    async def checkpoint(self, image: Path) -> None:
        """Write memory, processes and files to a folder; it continues."""
        await self.runsc.call("checkpoint", "-leave-running", "-image-path", str(image), self.name)

    async def destroy(self) -> None:
        channel, self._channel = self._channel, None
        try:
            if channel is not None:
                await channel.close()
            # Deleting a running one takes two seconds, mostly of waiting.
            handle = process_identity.open_pidfd(self.process)
            if handle is not None:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.close(handle)
            await _delete(self.runsc, self.name)
        finally:
            # A container that stays is an orphan, which the driver's sweep ends.
            self.runsc.live.discard(self.name)
        (self.folder / RECORD).unlink(missing_ok=True)

    @classmethod
    async def _start(
        cls, runsc: RunscClient, folder: Path, words: Iterable[str], *, generation: int
    ) -> Self:
        name = f"{_NAME}{secrets.token_hex(12)}"
        pid_file = folder / "pid"
        disk = folder if bundle.writes_to_disk((folder / CONFIG).read_bytes()) else None
        ends = make_pipes(folder)
        options = ("-detach", "-bundle", str(folder), "-pid-file", str(pid_file), name)
        runsc.live.add(name)
        starting = asyncio.create_task(
            runsc.start((*words, *options), ends=ends, log=folder / "log", disk=disk),
            name=f"start {name}",
        )
        try:
            await asyncio.shield(starting)
        except BaseException:
            await asyncio.shield(_end_unfinished(starting, runsc, name))
            raise
        finally:
            for end in ends:
                os.close(end)
        process = process_identity.identify(int(pid_file.read_text()))
        if process is None:
            await _delete(runsc, name)
            raise RunscError(f"container {name} ended at once: {tail(folder / 'log')}")
        made = cls(runsc, folder, name, process, generation)
        made._save_record()
        return made

    def _save_record(self) -> None:
        facts = {"pid": self.process.pid, "started": self.process.started}
        said = {
            "name": self.name,
            "generation": self.generation,
            "process": {**facts, "boot": self.process.boot},
        }
        atomic.write_text(self.folder / RECORD, json.dumps(said))

    async def _connected(self) -> GuestChannel:
        async with self._dialling:
            if self._channel is None:
                try:
                    channel = self._channel = await connect_agent(self.folder)
                except OSError as cause:
                    raise GuestLostError(f"container {self.name} has ended: {cause}") from cause
                await self._reset(channel)
            return self._channel

    async def _reset(self, channel: GuestChannel) -> None:
        state = await channel.reset()
        self._jobs = RunningJobs(state.jobs)
        self._is_reset = True
        channel.on_event = self._on_event
        token = secrets.token_bytes(_TOKEN_BYTES)
        named = GuestIdentity(env_id=self.name, token=token, generation=self.generation)
        await channel.sync(named)

    def _on_event(self, event: guest_pb2.GuestEvent) -> None:
        self._jobs.add_event(event)


async def _end_unfinished(starting: "asyncio.Task[None]", runsc: RunscClient, name: str) -> None:
    """End a container that was being started: it can be listed only after the command has ended."""
    await asyncio.wait([starting])
    if not starting.cancelled():
        starting.exception()  # marked as retrieved: there may be no waiter
    await _delete(runsc, name)


async def _delete(runsc: RunscClient, name: str) -> None:
    try:
        if name in await runsc.containers():
            await runsc.end(name)
    finally:
        runsc.live.discard(name)
