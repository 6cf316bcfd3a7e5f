"""One QEMU process (VMM): its QMP connection, the socket of its guest's agent."""

import asyncio
import contextlib
import ctypes
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

from etude.envserver.drivers import process_identity
from etude.envserver.drivers.process_identity import (
    EXIT_LIMIT_S,
    MARK,
    ProcessId,
    identify,
    mark_value,
    open_pidfd,
)
from etude.envserver.drivers.vm import vm_record
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import Vmm
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu.command_line import (
    CONSOLE,
    CONSOLE_BYTES,
    FORK_SERVER_SANDBOX,
    PROGRAM,
    SANDBOX,
    QemuConfig,
)
from etude.envserver.drivers.vm.qemu.qmp import QmpClient
from etude.envserver.drivers.vm.vm_record import VmRecord

_SET, _GET = 41, 42
"""PR_SET_THP_DISABLE and PR_GET_THP_DISABLE of prctl(2)."""

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    """Give programs that are started in the block small pages only.

    Where the kernel does not support this, it costs memory and nothing else.
    """
    before = _libc.prctl(_GET, 0, 0, 0, 0)
    _libc.prctl(_SET, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET, max(before, 0), 0, 0, 0)


_STDERR_BYTES = 2_000
_NAME_BYTES = 1024
"""Room for a child's folder name, which replaces that of its parent."""
_DISK_BYTES = 64 << 30
"""Limit of any guest's disk; the host's own quota is lower."""


@dataclass(slots=True)
class QemuVm(Vmm):
    """A running VMM. Its folder is private to the host and removed with it."""

    keeps_channel: ClassVar[bool] = True
    machine: QemuConfig
    folder: Path
    pid: int
    pidfd: int
    exited: "asyncio.Future[int | None]"
    """Exit code, negative for a signal; None for a process that is not our child."""
    _qmp: QmpClient | None = None

    @property
    def qmp(self) -> QmpClient:
        """QMP connection.

        Raises:
            VmmError: there is none.
        """
        if self._qmp is None:
            raise VmmError(f"VM {self.pid} has no QMP connection")
        return self._qmp

    async def connect(self) -> None:
        """Open the QMP connection, at the start or after an adoption.

        Raises:
            VmmError: the VMM has ended; the message has its last output.
        """
        self._qmp = QmpClient(_dial(self.folder, "qmp"), str(self.pid))
        try:
            await self._qmp.greet()
        except VmmError as error:
            raise await self.with_last_output(error) from error

    @override
    async def agent(self) -> socket.socket:
        return _dial(self.folder, "agent")

    @override
    async def is_stopped(self) -> bool:
        """Tell whether the VM is paused.

        Raises:
            VmmError: it is in a state that cannot be resumed.
        """
        match await self.qmp.execute("query-status"):
            case {"status": "running" | "paused" as status}:
                return bool(status == "paused")
            case other:
                raise VmmError(f"the VM is {str(other)[:100]}, and cannot be resumed")

    @override
    async def freeze(self) -> None:
        await self.qmp.execute("stop")

    @override
    async def thaw(self) -> None:
        await self.qmp.execute("cont")

    @override
    async def console(self) -> str:
        size = {"device": CONSOLE, "size": CONSOLE_BYTES}
        try:
            return str(await self.qmp.execute("ringbuf-read", size, limit_s=1.0)).strip()
        except VmmError:
            return ""

    async def disconnect(self) -> None:
        """Close the QMP connection; the VMM accepts another."""
        qmp, self._qmp = self._qmp, None
        if qmp is not None:
            await qmp.close()

    @override
    async def destroy(self) -> None:
        await self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @override
    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not self.exited.done():
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        await asyncio.wait([self.exited], timeout=EXIT_LIMIT_S)
        await self.disconnect()

    async def with_last_output(self, error: VmmError) -> VmmError:
        """Add the VMM's last output to an error, if it has ended."""
        await asyncio.wait([self.exited], timeout=1.0)
        if not self.exited.done():
            return error
        with (self.folder / "stderr").open("rb") as file:
            text = file.read(_STDERR_BYTES).decode(errors="replace").strip()
        code = self.exited.result()
        ended = "the VMM ended" if code is None else f"the VMM ended with {code}"
        return VmmError(f"{ended}: {text or error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VmmSockets:
    """Descriptors of listening sockets that the VMM inherits."""

    qmp: int
    agent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPreload:
    """Descriptors that make a VMM a fork server."""

    library: int
    """Descriptor of the preload library."""
    control: int
    """Descriptor of the socket over which it is told to fork."""


async def start(  # noqa: PLR0913 - what it starts is five things
    machine: QemuConfig,
    arguments: Callable[[VmmSockets], Sequence[str]],
    *,
    descriptors: Sequence[int],
    folder: Path,
    jail: Jail,
    template: str = "",
    preload: ForkPreload | None = None,
) -> QemuVm:
    """Start a VMM in a jail and connect to it.

    Args:
        machine: configuration of the VM.
        arguments: its command line, from its sockets.
        descriptors: descriptors that it inherits besides.
        folder: an empty folder.
        jail: user and limits of the process.
        template: address of its template.
        preload: makes it a fork server.

    Raises:
        VmmError: it did not start; the message has its last output.
    """
    name = mark_value(folder)
    with listening(folder, "qmp") as qmp, listening(folder, "agent") as agent:
        sockets = VmmSockets(qmp=qmp.fileno(), agent=agent.fileno())
        program = (PROGRAM, *arguments(sockets), *SANDBOX)
        inherited = (*descriptors, sockets.qmp, sockets.agent)
        if preload is not None:
            program = (
                *_preloaded(preload, sockets),
                PROGRAM,
                *arguments(sockets),
                *FORK_SERVER_SANDBOX,
            )
            inherited = (*inherited, preload.library, preload.control)
            name = name.ljust(_NAME_BYTES, os.sep)
        command = jail.command(
            program,
            memory_bytes=machine.memory_bytes,
            file_bytes=2 * machine.memory_bytes + (_DISK_BYTES if machine.has_disk else 0),
            inherited=inherited,
        )
        process = _start_process(command, inherited, folder, name)
    vm = _watch(machine, folder, process.pid, os.pidfd_open(process.pid), process.wait)
    try:
        _save_record(vm, jail, template)
        await vm.connect()
    except BaseException:
        await vm.destroy()
        raise
    return vm


async def connect_child(
    machine: QemuConfig, folder: Path, pid: int, *, jail: Jail, template: str
) -> QemuVm:
    """Connect to a VMM that a fork server has forked as a child of this process.

    Raises:
        VmmError: it has ended or does not answer.
    """

    def reap() -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    vm = _watch(machine, folder, pid, os.pidfd_open(pid), reap)
    try:
        _save_record(vm, jail, template)
        await vm.connect()
    except BaseException:
        await vm.destroy()
        raise
    return vm


async def adopt(machine: QemuConfig, folder: Path, process: ProcessId) -> QemuVm:
    """Adopt a VMM that an earlier process of this host started, and connect to it.

    Raises:
        VmmError: it has ended or does not answer; then it is killed, and its folder stays.
    """
    pidfd = open_pidfd(process)
    if pidfd is None:
        raise VmmError(f"VM {process.pid} has ended")
    vm = _watch(machine, folder, process.pid, pidfd, lambda: None)
    try:
        await vm.connect()
    except BaseException:
        await vm.kill()
        raise
    return vm


def _save_record(vm: QemuVm, jail: Jail, template: str) -> None:
    """Record the process before the guest runs, so that a successor finds it.

    Raises:
        VmmError: the record cannot be written.
    """
    process = identify(vm.pid)
    if process is None:
        return  # it has ended already, which connecting to it reports
    uid = jail.uid if os.geteuid() == 0 else os.geteuid()
    noted = VmRecord(process=process, uid=uid, template=template)
    try:
        vm_record.save(vm.folder, noted, is_durable=False)
    except OSError as cause:
        raise VmmError(f"record of VM {vm.pid} cannot be written: {cause}") from cause


def _preloaded(preload: ForkPreload, sockets: VmmSockets) -> Sequence[str]:
    """Prefix of a fork server's command line: env(1) sets the preload for QEMU alone."""
    library = f"LD_PRELOAD=/proc/self/fd/{preload.library}"
    return ("/usr/bin/env", library, f"ETUDE_FORK={preload.control} {sockets.qmp} {sockets.agent}")


def _start_process(
    command: Sequence[str], inherited: Sequence[int], folder: Path, name: str
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own. Blocks for the milliseconds of a vfork.

    Raises:
        VmmError: there is no such program.
    """
    try:
        with (folder / "stderr").open("wb") as words, small_pages():
            # asyncio's subprocesses have a thread each.
            return subprocess.Popen(
                command,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", MARK: name},
                # A terminal's Ctrl-C is for the host process, and VMs outlive its restart.
                start_new_session=True,
            )
    except OSError as cause:
        raise VmmError(f"{PROGRAM} cannot be started: {cause}") from cause


def _watch(
    machine: QemuConfig, folder: Path, pid: int, pidfd: int, reap: Callable[[], int | None]
) -> QemuVm:
    exited = process_identity.exit_future(pidfd, reap)
    return QemuVm(machine, folder, pid, pidfd, exited)


@contextlib.contextmanager
def listening(folder: Path, name: str) -> Iterator[socket.socket]:
    """Listen on a socket in a VM's folder, for its VMM."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, _short_path(folder) as at:
        listener.bind(f"{at}/{name}")
        listener.listen(1)
        yield listener


def _dial(folder: Path, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with _short_path(folder) as at:
            connection.connect(f"{at}/{name}")
    except OSError as cause:
        connection.close()
        raise VmmError(f"{folder / name}: {cause}") from cause
    return connection


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Open a short name for a folder: a socket's path has at most 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
