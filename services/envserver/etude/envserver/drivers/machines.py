"""What a driver of virtual machines is made of: monitors, and templates that make machines."""

import asyncio
import socket
from pathlib import Path
from typing import ClassVar, Protocol

from etude.envserver.drivers.qemu.delta import Delta
from etude.envserver.drivers.qemu.identity import ProcessId
from etude.envserver.drivers.qemu.jail import Jail
from etude.envserver.drivers.qemu.pages import PageBuffer


class Monitor(Protocol):
    """The process of one machine. Its folder is private to the node and goes with it."""

    keeps_channel: ClassVar[bool]
    """Whether the connection to the guest's agent outlives a snapshot of the machine."""
    folder: Path
    pid: int
    exited: "asyncio.Future[int | None]"
    """Its exit code, negative for a signal; None where it is another process's child."""

    async def agent(self) -> socket.socket:
        """A connection to the guest's agent, not blocking; there can be one at a time.

        Raises:
            VmmError: the monitor does not make one.
        """
        ...

    async def is_stopped(self) -> bool:
        """Whether the machine stands still.

        Raises:
            VmmError: it is in a state from which it does not go on.
        """
        ...

    async def freeze(self) -> None:
        """Stop the guest's processor: from here on the machine uses no CPU time."""
        ...

    async def thaw(self) -> None:
        """Let the guest run, also for the first time."""
        ...

    async def console(self) -> str:
        """The end of what the guest's kernel said; empty where the monitor cannot tell."""
        ...

    async def kill(self) -> None:
        """Kill the monitor; its folder stays, as a sign that there was one. Safe to repeat."""
        ...

    async def destroy(self) -> None:
        """Kill the monitor and remove its folder; safe to repeat."""
        ...


class Base(Protocol):
    """The state of a machine that has booted, from which others are made."""

    @property
    def address(self) -> str:
        """Digest of memory, devices and of what they run on: deltas name the template by it."""
        ...

    @property
    def compat_key(self) -> str:
        """Digest of what its machines run on."""
        ...

    async def spawn(self, folder: Path, jail: Jail) -> Monitor:
        """Start a monitor that waits for the template's state or for a delta of it.

        Args:
            folder: an empty folder of its own.
            jail: whom it runs as.

        Raises:
            VmmError: it did not start.
        """
        ...

    async def restore(self, shell: Monitor, saved: Delta | None) -> None:
        """Make a waiting monitor the template's machine, or the saved one, paused.

        Raises:
            VmmError: the state was refused; the shell is gone.
        """
        ...

    async def take(self, vm: Monitor, buffer: PageBuffer, *, keep_running: bool) -> Delta:
        """Save a machine that was made of it. It stays stopped if it is not to go on.

        The caller has brought its channel to a point between two frames.

        Raises:
            VmmError: the monitor failed.
        """
        ...

    async def adopt(self, folder: Path, process: ProcessId) -> Monitor:
        """Take up a monitor that an earlier process of this node started.

        Raises:
            VmmError: it has ended, or does not answer; then it is killed, and its folder stays.
        """
        ...

    def close(self) -> None:
        """Give its files back; machines that run keep theirs."""
        ...
