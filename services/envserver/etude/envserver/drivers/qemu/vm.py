"""One machine monitor: its process, its QMP connection, the socket of its guest's agent."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from etude.envserver.drivers.machines import identity, record
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.identity import (
    EXIT_LIMIT_S,
    MARK,
    ProcessId,
    handle,
    identify,
    name_of,
)
from etude.envserver.drivers.machines.jail import Jail
from etude.envserver.drivers.machines.protocol import Monitor
from etude.envserver.drivers.machines.record import VmRecord
from etude.envserver.drivers.qemu.machine import (
    CONSOLE,
    CONSOLE_BYTES,
    PROGRAM,
    SANDBOX,
    STEM_SANDBOX,
    Machine,
)
from etude.envserver.drivers.qemu.qmp import Qmp
from etude.envserver.drivers.qemu.smallpages import small_pages

_STDERR_BYTES = 2_000
_NAME_BYTES = 1024
"""Room for the folder of a child, whose name is written over that of its parent."""
_DISK_BYTES = 64 << 30
"""More than any guest's disk may grow to; the node's own quota is lower."""


@dataclass(slots=True)
class Vm(Monitor):
    """A running monitor. Its folder is private to the node and goes with it."""

    keeps_channel: ClassVar[bool] = True
    machine: Machine
    folder: Path
    pid: int
    pidfd: int
    exited: "asyncio.Future[int | None]"
    """Its exit code, negative for a signal; None where it is another process's child."""
    _qmp: Qmp | None = None

    @property
    def qmp(self) -> Qmp:
        """The connection to the monitor.

        Raises:
            VmmError: there is none.
        """
        if self._qmp is None:
            raise VmmError(f"machine {self.pid} has no connection")
        return self._qmp

    async def connect(self) -> None:
        """Connect to the monitor, at the start or after this process was started again.

        Raises:
            VmmError: it ended instead; the message has its last words.
        """
        self._qmp = Qmp(_dial(self.folder, "qmp"), str(self.pid))
        try:
            await self._qmp.greet()
        except VmmError as error:
            raise await self.explained(error) from error

    @override
    async def agent(self) -> socket.socket:
        """A connection to the guest's agent, not blocking; there can be one at a time."""
        return _dial(self.folder, "agent")

    @override
    async def is_stopped(self) -> bool:
        """Whether the machine stands still.

        Raises:
            VmmError: it is in a state from which it does not go on.
        """
        match await self.qmp.execute("query-status"):
            case {"status": "running" | "paused" as status}:
                return bool(status == "paused")
            case other:
                raise VmmError(f"the machine is {str(other)[:100]}, from where it does not go on")

    @override
    async def freeze(self) -> None:
        """Stop the guest's processor: from here on the machine uses no CPU time."""
        await self.qmp.execute("stop")

    @override
    async def thaw(self) -> None:
        """Let the guest run, also for the first time."""
        await self.qmp.execute("cont")

    @override
    async def console(self) -> str:
        """The end of what the guest's kernel said; empty where the monitor cannot tell."""
        size = {"device": CONSOLE, "size": CONSOLE_BYTES}
        try:
            return str(await self.qmp.execute("ringbuf-read", size, limit_s=1.0)).strip()
        except VmmError:
            return ""

    async def disconnect(self) -> None:
        """End the connection; the monitor goes on and takes another."""
        qmp, self._qmp = self._qmp, None
        if qmp is not None:
            await qmp.close()

    @override
    async def destroy(self) -> None:
        """Kill the monitor and remove its folder; safe to repeat."""
        await self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @override
    async def kill(self) -> None:
        """Kill the monitor; its folder stays, as a sign that there was one. Safe to repeat."""
        with contextlib.suppress(ProcessLookupError):
            if not self.exited.done():
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        await asyncio.wait([self.exited], timeout=EXIT_LIMIT_S)
        await self.disconnect()

    async def explained(self, error: VmmError) -> VmmError:
        """The error with the monitor's last words, if it ended."""
        await asyncio.wait([self.exited], timeout=1.0)
        if not self.exited.done():
            return error
        with (self.folder / "stderr").open("rb") as file:
            text = file.read(_STDERR_BYTES).decode(errors="replace").strip()
        code = self.exited.result()
        ended = "the monitor ended" if code is None else f"the monitor ended with {code}"
        return VmmError(f"{ended}: {text or error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sockets:
    """Listening sockets that the monitor takes over, by number."""

    qmp: int
    agent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """What makes a monitor one that can be forked."""

    library: int
    """Descriptor of the library."""
    control: int
    """Of the socket over which it is asked to."""


async def start(  # noqa: PLR0913 - what it starts is five things
    machine: Machine,
    arguments: Callable[[Sockets], Sequence[str]],
    *,
    descriptors: Sequence[int],
    folder: Path,
    jail: Jail,
    template: str = "",
    preload: Preload | None = None,
) -> Vm:
    """Start a monitor in a jail and connect to it.

    Args:
        machine: what it runs.
        arguments: its command line, from the sockets that it gets.
        descriptors: what it inherits beside those.
        folder: an empty folder of its own.
        jail: whom it runs as.
        template: address of what it will be a clone of.
        preload: makes it one that can be forked.

    Raises:
        VmmError: it did not start; the message has its last words.
    """
    name = name_of(folder)
    with listening(folder, "qmp") as qmp, listening(folder, "agent") as agent:
        sockets = Sockets(qmp=qmp.fileno(), agent=agent.fileno())
        program = (PROGRAM, *arguments(sockets), *SANDBOX)
        inherited = (*descriptors, sockets.qmp, sockets.agent)
        if preload is not None:
            program = (*_preloaded(preload, sockets), PROGRAM, *arguments(sockets), *STEM_SANDBOX)
            inherited = (*inherited, preload.library, preload.control)
            name = name.ljust(_NAME_BYTES, os.sep)
        command = jail.command(
            program,
            memory_bytes=machine.memory_bytes,
            file_bytes=2 * machine.memory_bytes + (_DISK_BYTES if machine.has_disk else 0),
            inherited=inherited,
        )
        process = _spawned(command, inherited, folder, name)
    vm = _watched(machine, folder, process.pid, os.pidfd_open(process.pid), process.wait)
    try:
        _note(vm, jail, template)
        await vm.connect()
    except BaseException:
        await vm.destroy()
        raise
    return vm


async def taken(machine: Machine, folder: Path, pid: int, *, jail: Jail, template: str) -> Vm:
    """Connect to a monitor that another one has forked as a child of this process.

    Raises:
        VmmError: it has ended, or does not answer.
    """

    def reap() -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    vm = _watched(machine, folder, pid, os.pidfd_open(pid), reap)
    try:
        _note(vm, jail, template)
        await vm.connect()
    except BaseException:
        await vm.destroy()
        raise
    return vm


async def adopt(machine: Machine, folder: Path, process: ProcessId) -> Vm:
    """Take up a monitor that an earlier process of this node started, and connect to it.

    Raises:
        VmmError: it has ended, or does not answer; then it is killed, and its folder stays.
    """
    pidfd = handle(process)
    if pidfd is None:
        raise VmmError(f"machine {process.pid} has ended")
    vm = _watched(machine, folder, process.pid, pidfd, lambda: None)
    try:
        await vm.connect()
    except BaseException:
        await vm.kill()
        raise
    return vm


def _note(vm: Vm, jail: Jail, template: str) -> None:
    """Write down which process it is: before the guest runs, so that none is ever unknown.

    Raises:
        VmmError: it cannot be written down.
    """
    process = identify(vm.pid)
    if process is None:
        return  # it ended already, which connecting to it will tell
    uid = jail.uid if os.geteuid() == 0 else os.geteuid()
    noted = VmRecord(process=process, uid=uid, template=template)
    try:
        record.save(vm.folder, noted, is_durable=False)
    except OSError as cause:
        raise VmmError(f"machine {vm.pid} cannot be written down: {cause}") from cause


def _preloaded(preload: Preload, sockets: Sockets) -> Sequence[str]:
    """Words before a monitor's: no program before it is to be one that can be forked."""
    library = f"LD_PRELOAD=/proc/self/fd/{preload.library}"
    return ("/usr/bin/env", library, f"ETUDE_FORK={preload.control} {sockets.qmp} {sockets.agent}")


def _spawned(
    command: Sequence[str], inherited: Sequence[int], folder: Path, name: str
) -> "subprocess.Popen[bytes]":
    """A process of a session of its own. Blocks for the milliseconds of a vfork.

    Raises:
        VmmError: there is no such program.
    """
    try:
        with (folder / "stderr").open("wb") as words, small_pages():
            # asyncio's own way has a thread for each process.
            return subprocess.Popen(
                command,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", MARK: name},
                # A terminal's Ctrl-C is for the node, and machines outlive its restart.
                start_new_session=True,
            )
    except OSError as cause:
        raise VmmError(f"{PROGRAM} cannot be started: {cause}") from cause


def _watched(
    machine: Machine, folder: Path, pid: int, pidfd: int, reap: Callable[[], int | None]
) -> Vm:
    exited = identity.exit_of(pidfd, reap)
    return Vm(machine, folder, pid, pidfd, exited)


@contextlib.contextmanager
def listening(folder: Path, name: str) -> Iterator[socket.socket]:
    """A socket of a machine's folder, for its monitor."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, _opened(folder) as at:
        listener.bind(f"{at}/{name}")
        listener.listen(1)
        yield listener


def _dial(folder: Path, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with _opened(folder) as at:
            connection.connect(f"{at}/{name}")
    except OSError as cause:
        connection.close()
        raise VmmError(f"{folder / name}: {cause}") from cause
    return connection


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[str]:
    """A short name for a folder: a socket's path has at most 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
