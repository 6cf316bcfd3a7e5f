"""What drivers of virtual machines are made of: monitors, deltas, templates that make machines."""

import asyncio
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.identity import ProcessId
from etude.envserver.drivers.machines.jail import Jail
from etude.envserver.drivers.machines.pages import PageBuffer

_M = TypeVar("_M", bound="Monitor")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The saved state of one machine. It owns its file descriptors."""

    template: str
    """Address of the template that it belongs to."""
    is_full: bool
    """Whether it holds all of the memory, because a smaller one is not possible."""
    stream: int
    """A file that nobody changes."""
    offset: int = 0
    """Where in it the stream begins, in bytes."""
    disk: tuple[int, ...] = ()
    """Layers of its disk, each based on the next, for reading only."""
    changed_bytes: int
    """Of the guest's memory."""
    pause_s: float = 0.0
    """How long the guest stood still for it."""
    digest: str = ""
    """Of what was stored; empty for one that was not."""

    def close(self) -> None:
        """Give the files back."""
        for descriptor in (self.stream, *self.disk):
            os.close(descriptor)


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


def own(monitor: Monitor, kind: type[_M]) -> _M:
    """A monitor of one driver's kind.

    Raises:
        VmmError: it is another driver's.
    """
    if not isinstance(monitor, kind):
        raise VmmError(f"machine {monitor.pid} is another driver's")
    return monitor
