"""One QEMU process (VMM): its QMP connection, the socket of its guest's agent."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from etude.envserver.drivers import process_identity
from etude.envserver.drivers.process_identity import MARK, ProcessId, identify, mark_value
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu.command_line import (
    CONSOLE,
    CONSOLE_BYTES,
    PROGRAM,
    QemuConfig,
)
from etude.envserver.drivers.vm.qemu.qmp import Event, QmpClient
from etude.envserver.drivers.vm.vmm_process import (
    VmmProcess,
    is_paused,
    last_output,
    pidfd_of,
    vmm_uid,
)

_SET, _GET = 41, 42
"""PR_SET_THP_DISABLE and PR_GET_THP_DISABLE of prctl(2)."""

_EVENT_CHARACTERS = 500

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True, kw_only=True)
class QemuVm(VmmProcess):
    """A running QEMU process. Its folder is private to the host and removed with it."""

    keeps_channel: ClassVar[bool] = True
    machine: QemuConfig
    jail: Jail = field(default_factory=Jail)
    """Its user; the default for one that was adopted."""
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
        self._qmp.expect(_is_disk_error).add_done_callback(self._end_without_disk)
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
        answer = await self.qmp.execute("query-status")
        return is_paused(answer.get("status") if isinstance(answer, dict) else answer)

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
    async def kill(self) -> None:
        await VmmProcess.kill(self)
        await self.disconnect()

    def _end_without_disk(self, failed: "asyncio.Future[Event]") -> None:
        """End a VM that cannot write to its disk: the host's is full, and the guest is stopped."""
        if failed.cancelled() or failed.exception() is not None or self.exited.done():
            return  # the connection has ended before
        log.error(
            "VM %d is ended, the host's disk failed: %s",
            self.pid,
            str(failed.result())[:_EVENT_CHARACTERS],
        )
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def with_last_output(self, error: VmmError) -> VmmError:
        """Add the VMM's last output to an error, if it has ended."""
        await asyncio.wait([self.exited], timeout=1.0)
        if not self.exited.done():
            return error
        code = self.exited.result()
        ended = "the VMM ended" if code is None else f"the VMM ended with {code}"
        return VmmError(f"{ended}: {last_output(self.folder) or error}")


def _is_disk_error(event: Event) -> bool:
    return event.get("event") == "BLOCK_IO_ERROR"


@dataclass(frozen=True, slots=True, kw_only=True)
class VmmSockets:
    """Descriptors of listening sockets that the VMM inherits."""

    qmp: int
    agent: int


async def start(  # noqa: PLR0913 - what it starts is five things
    machine: QemuConfig,
    program: Callable[[VmmSockets], Sequence[str]],
    *,
    descriptors: Sequence[int],
    folder: Path,
    jail: Jail,
    template: str = "",
    mark_bytes: int = 0,
) -> QemuVm:
    """Start a VMM in a jail and connect to it.

    Args:
        machine: configuration of the VM.
        program: the program and its arguments, from its sockets.
        descriptors: descriptors that it inherits besides.
        folder: an empty folder.
        jail: user and limits of the process.
        template: address of its template.
        mark_bytes: least length of its folder's name in its environment.

    Raises:
        VmmError: it did not start; the message has its last output.
    """
    mark = mark_value(folder).ljust(mark_bytes, os.sep)
    own = jail.take_user()
    try:
        with listening(folder, "qmp") as qmp, listening(folder, "agent") as agent:
            sockets = VmmSockets(qmp=qmp.fileno(), agent=agent.fileno())
            inherited = (*descriptors, sockets.qmp, sockets.agent)
            command = own.command(
                program(sockets),
                memory_bytes=machine.memory_bytes,
                file_bytes=max(2 * machine.memory_bytes, machine.disk_bytes),
                inherited=inherited,
            )
            process = _start_process(command, inherited, folder, mark)
        vm = _watch(machine, folder, process.pid, os.pidfd_open(process.pid), process.wait)
    except BaseException:
        own.give_user()
        raise
    return await _connected(vm, own, template)


async def connect_child(
    machine: QemuConfig, folder: Path, pid: int, *, jail: Jail, template: str
) -> QemuVm:
    """Connect to a VMM that a fork server of this user has forked as a child of this process."""

    def reap() -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    vm = _watch(machine, folder, pid, os.pidfd_open(pid), reap)
    jail.share_user()
    return await _connected(vm, jail, template)


async def _connected(vm: QemuVm, jail: Jail, template: str) -> QemuVm:
    """Record and connect a new VMM, whose user is free once it has ended; destroy it on failure."""
    vm.jail = jail
    vm.exited.add_done_callback(lambda _: jail.give_user())
    try:
        vm.save_record(identify(vm.pid), uid=vmm_uid(jail.uid), template=template)
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
    vm = _watch(machine, folder, process.pid, pidfd_of(process), lambda: None)
    try:
        await vm.connect()
    except BaseException:
        await vm.kill()
        raise
    return vm


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
    return QemuVm(machine=machine, folder=folder, pid=pid, pidfd=pidfd, exited=exited)


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


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    """Give programs that are started in the block small pages only, if the kernel can.

    A VMM asks for huge pages and writes to a tenth of most: a clone that has answered once held
    18.8 MiB of its own instead of 15.7, for no less CPU time.
    """
    before = _libc.prctl(_GET, 0, 0, 0, 0)
    _libc.prctl(_SET, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET, max(before, 0), 0, 0, 0)
