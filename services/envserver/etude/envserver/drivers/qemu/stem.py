"""A stopped clone whose process is split: each part is a machine that has run for a while.

Under TCG a new clone translates whatever its guest does, kernel and agent included, and that is
most of what a start costs. A part has all of it from its stem, and shares it until it writes there.
"""

import asyncio
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from etude.envserver.drivers.qemu import clone, guests, vm
from etude.envserver.drivers.qemu.errors import VmmError
from etude.envserver.drivers.qemu.jail import Jail
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

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return not self.vm.exited.done()

    async def split(self, folder: Path) -> Vm:
        """A stopped machine of its own that is nobody's yet.

        Args:
            folder: an empty folder of its own.

        Raises:
            VmmError: the process was not forked, or its child does not answer.
        """
        async with self._turn:
            pid = await self._forked(folder)
        return await vm.taken(
            self.vm.machine, folder, pid, jail=self._jail, template=self._template
        )

    async def destroy(self) -> None:
        """End it; its parts go on. Safe to repeat."""
        self._control.close()
        await self.vm.destroy()

    async def _forked(self, folder: Path) -> int:
        with (
            (folder / "stderr").open("wb") as words,
            vm.listening(folder, "qmp") as qmp,
            vm.listening(folder, "agent") as agent,
        ):
            files = [qmp.fileno(), agent.fileno(), words.fileno()]
            try:
                socket.send_fds(self._control, [os.fsencode(vm.name_of(folder))], files)
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


async def grown(base: Template, library: Path, *, folder: Path, jail: Jail) -> Stem:
    """A clone that has done once what environments do first, and that can be split.

    Args:
        base: its template.
        library: what is loaded into its monitor.
        folder: an empty folder of its own.
        jail: whom it runs as; its parts run as the same.

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
        found = await guests.rehearsed(shell, base)
        await found.channel.close()
        await shell.disconnect()
    except BaseException:
        ours.close()
        raise
    return Stem(shell, ours, jail, base.address)
