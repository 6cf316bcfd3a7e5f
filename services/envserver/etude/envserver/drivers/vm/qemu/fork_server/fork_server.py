"""Fork server: a paused clone whose process forks; each child is a VM that has run for a while.

Under TCG a new clone translates all code that its guest runs, kernel and agent included, and that
is most of a start's cost. A child has the translated code of its parent, copy-on-write.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from etude.envserver.drivers.process_identity import mark_value
from etude.envserver.drivers.vm import disk, guest_vm
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import VmDelta
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import template, vm
from etude.envserver.drivers.vm.qemu.command_line import PROGRAM
from etude.envserver.drivers.vm.qemu.fork_server import child_processes
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.qemu.vm import QemuVm

_FORK_LIMIT_S = 20.0
"""It takes milliseconds; a busy machine may have no core free."""
_TRANSLATION_MIB = 64
"""Translation cache that children share: a start of Python's code fits too."""
_SANDBOX = ("-sandbox", "on,obsolete=deny,elevateprivileges=deny,resourcecontrol=deny")
"""The preload library denies programs, and processes to children."""
_MARK_BYTES = 1024
"""Room for a child's folder name, which replaces that of its parent."""
_ANSWER_BYTES = 4


@dataclass(slots=True)
class ForkServer:
    """The server's process, and the socket over which it is told to fork."""

    vm: QemuVm
    _control: socket.socket
    _template: str
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _children: set[int] = field(default_factory=set)
    _is_over: bool = False

    @property
    def is_alive(self) -> bool:
        return not self._is_over and not self.vm.exited.done()

    async def spawn(self, folder: Path) -> QemuVm:
        """Spawn a paused child VM without identity.

        A server that fails once is ended, with all children that are not in use.

        Raises:
            CancelledError: the caller was cancelled; there is no child.
            VmmError: the process was not forked, or its child does not answer.
        """
        spawning = asyncio.create_task(self._spawn(folder), name=f"fork VM {self.vm.pid}")
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # An order cannot be cancelled, and its answer must be read. Shielded again: a second
            # cancellation leaves no child either.
            await asyncio.shield(asyncio.create_task(_discard_child(spawning)))
            raise

    async def destroy(self) -> None:
        """End it; its children go on. Safe to repeat."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # a waiter for an answer gets none
        await self.vm.kill()
        async with self._lock:
            await self._end()

    async def _spawn(self, folder: Path) -> QemuVm:
        async with self._lock:
            if self._is_over:
                raise VmmError(f"VM {self.vm.pid} was not forked: it has failed before")
            try:
                pid = await self._fork(folder)
                await child_processes.wait_until_named(pid, folder)
            except BaseException:
                # A late answer would be taken for that of a later order.
                self._is_over = True
                await self._end()
                raise
            self._children.add(pid)
        try:
            found = await vm.connect_child(
                self.vm.machine, folder, pid, jail=self.vm.jail, template=self._template
            )
        except BaseException as cause:
            self._children.discard(pid)
            if isinstance(cause, OSError):  # it cannot be watched: it ends with its parent
                await self.destroy()
                raise VmmError(f"child VM {pid} cannot be adopted: {cause}") from cause
            raise
        found.exited.add_done_callback(lambda _: self._children.discard(pid))
        return found

    async def _end(self) -> None:
        self._is_over = True
        await self.vm.destroy()
        self._control.close()
        # After its end it forks no more.
        await asyncio.to_thread(
            child_processes.kill_children, self.vm.pid, frozenset(self._children)
        )

    async def _fork(self, folder: Path) -> int:
        with (
            (folder / "stderr").open("wb") as words,
            vm.listening(folder, "qmp") as qmp,
            vm.listening(folder, "agent") as agent,
            contextlib.ExitStack() as opened,
        ):
            files = [qmp.fileno(), agent.fileno(), words.fileno()]
            # The server does not run, so its disk is that of the moment that is forked.
            copy = partial(disk.copy, self.vm.folder, folder / disk.DISK)
            own_disk = await disk.run_copy(copy, disk.used_in(self.vm.folder))
            opened.callback(os.close, own_disk)
            files.append(own_disk)
            try:
                socket.send_fds(self._control, [os.fsencode(mark_value(folder))], files)
                async with asyncio.timeout(_FORK_LIMIT_S):
                    loop = asyncio.get_running_loop()
                    answer = await loop.sock_recv(self._control, _ANSWER_BYTES)
            except (OSError, TimeoutError) as cause:
                raise VmmError(f"VM {self.vm.pid} was not forked: {cause}") from cause
        if len(answer) != _ANSWER_BYTES:
            raise VmmError(f"VM {self.vm.pid} ended instead of forking")
        outcome = int.from_bytes(answer, "little", signed=True)
        if outcome <= 0:
            raise VmmError(f"VM {self.vm.pid} was not forked: {os.strerror(-outcome)}")
        return outcome


async def _discard_child(spawning: "asyncio.Task[QemuVm]") -> None:
    await asyncio.wait([spawning])
    if not spawning.cancelled() and spawning.exception() is None:
        await spawning.result().destroy()


async def start_fork_server(
    base: QemuTemplate, library: Path, *, folder: Path, jail: Jail, saved: VmDelta | None = None
) -> ForkServer:
    """Start a fork server: a clone that has done what environments do first."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(0)
    try:
        with theirs, library.open("rb") as file:
            shell = await _start_vmm(base, file.fileno(), theirs.fileno(), folder, jail)
        try:
            await _check_loaded(shell, library)
            found = await guest_vm.start_fork_parent(shell, base, saved)
            await found.channel.close()
            await shell.disconnect()
            await child_processes.wait_until_idle(shell.pid)
        except BaseException:
            await shell.destroy()
            raise
    except BaseException:
        ours.close()
        raise
    return ForkServer(shell, ours, base.address)


async def _start_vmm(
    base: QemuTemplate, library: int, control: int, folder: Path, jail: Jail
) -> QemuVm:
    with template.new_disk(base, folder) as own_disk:

        def program(sockets: vm.VmmSockets) -> Sequence[str]:
            arguments = template.clone_arguments(
                base, sockets, own_disk, translation_mib=_TRANSLATION_MIB
            )
            return (
                # env(1) sets the preload for QEMU alone, not for programs before it.
                *("/usr/bin/env", f"LD_PRELOAD=/proc/self/fd/{library}"),
                f"ETUDE_FORK={control} {sockets.qmp} {sockets.agent} {own_disk}",
                *(PROGRAM, *arguments, *_SANDBOX),
            )

        return await vm.start(
            base.machine,
            program,
            descriptors=(base.memory, base.root, library, control, own_disk),
            folder=folder,
            jail=jail,
            template=base.address,
            mark_bytes=_MARK_BYTES,
        )


async def _check_loaded(shell: QemuVm, library: Path) -> None:
    """Check that the library is loaded: the loader ignores one that fails, and so its filter.

    Raises:
        VmmError: it is not; the VMM is gone.
    """
    if not await asyncio.to_thread(_is_mapped, shell.pid, library):
        await shell.destroy()
        raise VmmError(f"VM {shell.pid} has not loaded {library}: it cannot be forked")


def _is_mapped(pid: int, library: Path) -> bool:
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return False  # it has ended
    return any(line.endswith(b" " + os.fsencode(library.resolve())) for line in lines)
