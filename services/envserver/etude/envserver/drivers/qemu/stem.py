"""A stopped clone whose process is split: each part is a machine that has run for a while.

Under TCG a new clone translates whatever its guest does, kernel and agent included, and that is
most of what a start costs. A part has all of it from its stem, and shares it until it writes there.
"""

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from etude.envserver.drivers.machines import guests
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.identity import name_of
from etude.envserver.drivers.machines.jail import Jail
from etude.envserver.drivers.machines.protocol import Delta
from etude.envserver.drivers.qemu import children, clone, vm
from etude.envserver.drivers.qemu.template import Template
from etude.envserver.drivers.qemu.vm import Preload, Vm

_SPLIT_LIMIT_S = 20.0
"""It takes milliseconds; a neighbour may hold every core."""
_ANSWER_BYTES = 4


@dataclass(slots=True)
class Stem:
    """One process, and the socket over which it is asked to fork."""

    vm: Vm
    _control: socket.socket
    _jail: Jail
    _template: str
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _parts: set[int] = field(default_factory=set)
    """Processes that were split off and are somebody's."""
    _is_over: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return not self._is_over and not self.vm.exited.done()

    async def split(self, folder: Path) -> Vm:
        """A stopped machine of its own that is nobody's yet.

        A stem that fails once is ended, with whatever it forked and nobody has.

        Args:
            folder: an empty folder of its own.

        Raises:
            VmmError: the process was not forked, or its child does not answer.
            CancelledError: nobody waits for it any more; there is no child.
        """
        splitting = asyncio.create_task(self._split(folder), name=f"split {self.vm.pid}")
        try:
            return await asyncio.shield(splitting)
        except asyncio.CancelledError:
            # An order cannot be taken back, and its answer is nobody else's. Shielded again: who
            # is cancelled twice leaves no child either.
            await asyncio.shield(asyncio.create_task(_given_up(splitting)))
            raise

    async def destroy(self) -> None:
        """End it; its parts go on. Safe to repeat."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # who waits for an answer gets none
        await self.vm.kill()
        async with self._turn:
            await self._end()

    async def _split(self, folder: Path) -> Vm:
        async with self._turn:
            if self._is_over:
                raise VmmError(f"machine {self.vm.pid} was not forked: it has failed before")
            try:
                pid = await self._forked(folder)
                await children.named(pid, folder)
            except BaseException:
                # An answer may be on its way that a later order would take for its own.
                self._is_over = True
                await self._end()
                raise
            self._parts.add(pid)
        try:
            found = await vm.taken(
                self.vm.machine, folder, pid, jail=self._jail, template=self._template
            )
        except BaseException as cause:
            self._parts.discard(pid)
            if isinstance(cause, OSError):  # nobody can watch it: it ends with its stem
                await self.destroy()
                raise VmmError(f"machine {pid} cannot be taken over: {cause}") from cause
            raise
        found.exited.add_done_callback(lambda _: self._parts.discard(pid))
        return found

    async def _end(self) -> None:
        self._is_over = True
        await self.vm.destroy()
        self._control.close()
        # It has ended, so that it forks no more.
        await asyncio.to_thread(children.end, self.vm.pid, frozenset(self._parts))

    async def _forked(self, folder: Path) -> int:
        with (
            (folder / "stderr").open("wb") as words,
            vm.listening(folder, "qmp") as qmp,
            vm.listening(folder, "agent") as agent,
        ):
            files = [qmp.fileno(), agent.fileno(), words.fileno()]
            try:
                socket.send_fds(self._control, [os.fsencode(name_of(folder))], files)
                async with asyncio.timeout(_SPLIT_LIMIT_S):
                    loop = asyncio.get_running_loop()
                    answer = await loop.sock_recv(self._control, _ANSWER_BYTES)
            except (OSError, TimeoutError) as cause:
                raise VmmError(f"machine {self.vm.pid} was not forked: {cause}") from cause
        if len(answer) != _ANSWER_BYTES:
            raise VmmError(f"machine {self.vm.pid} ended instead of being forked")
        outcome = int.from_bytes(answer, "little", signed=True)
        if outcome <= 0:
            raise VmmError(f"machine {self.vm.pid} was not forked: {os.strerror(-outcome)}")
        return outcome


async def _given_up(splitting: "asyncio.Task[Vm]") -> None:
    await asyncio.wait([splitting])
    if not splitting.cancelled() and splitting.exception() is None:
        await splitting.result().destroy()


async def grown(
    base: Template, library: Path, *, folder: Path, jail: Jail, saved: Delta | None = None
) -> Stem:
    """A clone that has done once what environments do first, and that can be split.

    Args:
        base: its template.
        library: what is loaded into its monitor.
        folder: an empty folder of its own.
        jail: whom it runs as; its parts run as the same.
        saved: the state that it takes up; unset is the template's.

    Raises:
        GuestLostError: its agent does not answer.
        VmmError: the monitor failed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(0)
    try:
        with theirs, library.open("rb") as file:
            preload = Preload(library=file.fileno(), control=theirs.fileno())
            shell = await clone.spawn_shell(base, folder=folder, jail=jail, preload=preload)
        try:
            await _check_loaded(shell, library)
            found = await guests.rehearsed(shell, base, saved)
            await found.channel.close()
            await shell.disconnect()
            await children.at_rest(shell.pid)
        except BaseException:
            await shell.destroy()
            raise
    except BaseException:
        ours.close()
        raise
    return Stem(shell, ours, jail, base.address)


async def _check_loaded(shell: Vm, library: Path) -> None:
    """The loader goes on without a library that it cannot load, and so without its filter.

    Raises:
        VmmError: the monitor has not loaded it, and is gone.
    """
    if not await asyncio.to_thread(_is_mapped, shell.pid, library):
        await shell.destroy()
        raise VmmError(f"machine {shell.pid} has not loaded {library}: it cannot be forked")


def _is_mapped(pid: int, library: Path) -> bool:
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return False  # it has ended
    return any(line.endswith(b" " + os.fsencode(library.resolve())) for line in lines)
