"""Machines whose agent answers: clones of a template with an identity of their own."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from etude.agent.workspace import WorkspaceError
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.protocol import Base, Delta, Monitor
from etude.envserver.drivers.machines.warmup import rehearse
from etude.envserver.guest.calls import Request
from etude.envserver.guest.channel import GuestChannel, GuestLostError, Identity
from etude.v1 import guest_pb2

BOOT_LIMIT_S = 120.0
"""A cold boot takes 2.4 CPU seconds under TCG, on a host that may have much else to run."""
_TOKEN_BYTES = 32
_READ = guest_pb2.GuestCall(read=guest_pb2.GuestRead(path="passwd"), cwd="/etc")
"""Of a small file; that there is none is an answer too."""
_READ_LIMIT_S = 30.0
_SAVED_LIMIT_S = 2.0
"""Of a guest that may not want to answer, and keeps others waiting."""
_NOBODYS = Identity(env_id="", token=b"", generation=0)
"""A template's: it refuses every call, so that no clone can be used before it has its own."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A machine and the channel to its agent."""

    vm: Monitor
    channel: GuestChannel
    identity: Identity
    """What it became at its last SYNC."""
    jobs: frozenset[int] = frozenset()
    """Commands that ran in its background when it was taken up."""
    is_met: bool = True
    """Whether this process has talked to its agent: one that was found standing still waits."""

    async def destroy(self) -> None:
        """End the machine; safe to repeat."""
        await self.channel.close()
        await self.vm.destroy()


async def warmed(channel: GuestChannel, warm_up: Callable[[GuestChannel], Awaitable[None]]) -> None:
    """Bring a machine that boots to where its clones begin; it is nobody's, its channel closed.

    Raises:
        GuestLostError: the agent does not answer.
    """
    await channel.hello(timeout_s=BOOT_LIMIT_S)
    await channel.reset()
    await channel.sync(_identity("template", generation=0))
    await warm_up(channel)
    await channel.sync(_NOBODYS)
    await channel.close()


async def begun(
    shell: Monitor,
    base: Base,
    *,
    name: str,
    saved: Delta | None = None,
    generation: int = 1,
) -> Guest:
    """The clone that a waiting monitor becomes; it runs and answers. The shell goes on failure.

    Args:
        shell: the monitor.
        base: its template.
        name: its environment's id and host name.
        saved: the state that it takes up; unset is the template's.
        generation: above one it goes on as what it was, and keeps its names.

    Raises:
        GuestLostError: the agent does not answer.
        VmmError: the monitor failed.
    """
    identity = _identity(name, generation=generation)
    try:
        found = await _awake(shell, base, saved)
        await found.channel.sync(identity)
    except GuestLostError as error:
        error.add_note(await shell.console())
        await shell.destroy()
        raise
    except BaseException:
        await shell.destroy()
        raise
    return replace(found, identity=identity)


async def paused(shell: Monitor, base: Base) -> Guest:
    """The clone that a waiting monitor becomes: it has answered once, is nobody's, stands still.

    What a guest does for the first time is translated then, and costs ten times as much: whoever
    gets this one gives it names, and reads a file.

    Raises:
        GuestLostError: the agent does not answer.
        VmmError: the monitor failed.
    """
    return await _at_rest(shell, base, None, _reads(_READ_LIMIT_S), name="paused")


async def rehearsed(shell: Monitor, base: Base, saved: Delta | None = None) -> Guest:
    """A clone that has done what environments do first; it is nobody's, and stands still.

    Args:
        shell: the monitor.
        base: its template.
        saved: the state that it takes up: then it keeps its names, and only answers once.

    Raises:
        GuestLostError: the agent does not answer.
        VmmError: the monitor failed.
    """
    does = rehearse if saved is None else _reads(_SAVED_LIMIT_S)
    try:
        return await _at_rest(shell, base, saved, does, name="rehearsal")
    except WorkspaceError as error:
        raise VmmError(f"what environments do first cannot be done: {error}") from error


async def split_off(part: Monitor, *, name: str, generation: int = 1) -> Guest:
    """A part of a stem that runs as an environment of its own; the machine goes on failure.

    Args:
        part: stopped, and nobody's yet.
        name: its environment's id and host name.
        generation: above one it goes on as what it was, and keeps its names.

    Raises:
        GuestLostError: the agent does not answer.
        VmmError: the monitor failed.
    """
    identity = _identity(name, generation=generation)
    try:
        found = await _running(part)
        await found.channel.sync(identity)
    except BaseException:
        await part.destroy()
        raise
    return replace(found, identity=identity)


async def handed_out(waiting: Guest, *, name: str) -> Guest:
    """A paused clone that runs as an environment of its own; the machine goes on failure.

    Raises:
        GuestLostError: the agent does not answer.
        VmmError: the monitor failed.
    """
    identity = _identity(name, generation=1)
    try:
        await waiting.vm.thaw()
        await waiting.channel.sync(identity)
    except BaseException:
        await waiting.destroy()
        raise
    return replace(waiting, identity=identity)


async def taken_up(found: Monitor, *, name: str, generation: int, is_stopped: bool) -> Guest:
    """The guest of a machine that an earlier process left. One that stands still is not woken.

    Args:
        found: its monitor.
        name: what it is: host name and machine id stay, since nothing has happened to it.
        generation: of its last SYNC.
        is_stopped: whether it stands still.

    Raises:
        GuestLostError: the agent does not answer.
        VmmError: the monitor failed.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    identity = Identity(env_id=name, token=token, generation=generation)
    guest = Guest(found, await connected(found), identity, is_met=False)
    if is_stopped:
        return guest
    try:
        return await met(guest)
    except BaseException:
        await guest.channel.close()
        raise


async def met(guest: Guest) -> Guest:
    """A guest of an earlier process that runs, once it begins anew and has a token of this one.

    Raises:
        GuestLostError: the agent does not answer.
    """
    state = await guest.channel.reset()
    await guest.channel.sync(guest.identity)
    return replace(guest, jobs=frozenset(state.jobs), is_met=True)


async def met_again(guest: Guest) -> Guest:
    """A guest whose connection a snapshot has ended. It keeps its names, and its background.

    Raises:
        GuestLostError: the agent does not answer.
        VmmError: the monitor failed.
    """
    await guest.channel.close()
    channel = await connected(guest.vm)
    state = await channel.reset()
    await channel.sync(replace(guest.identity, hostname="", machine_id=b""))
    return replace(guest, channel=channel, jobs=frozenset(state.jobs), is_met=True)


async def _at_rest(
    shell: Monitor,
    base: Base,
    saved: Delta | None,
    does: Callable[[GuestChannel], Awaitable[None]],
    *,
    name: str,
) -> Guest:
    """A clone that has done something, is nobody's, and stands still; the shell goes on failure."""
    try:
        found = await _awake(shell, base, saved)
        await found.channel.sync(_identity(name, generation=0 if saved is None else 2))
        await does(found.channel)
        await found.channel.sync(_NOBODYS)
        await shell.freeze()
    except BaseException:
        await shell.destroy()
        raise
    return found


def _reads(limit_s: float) -> Callable[[GuestChannel], Awaitable[None]]:
    async def read(channel: GuestChannel) -> None:
        await channel.call(Request(operation=_READ, deadline_s=limit_s))

    return read


async def _awake(shell: Monitor, base: Base, saved: Delta | None) -> Guest:
    await base.restore(shell, saved)
    return await _running(shell)


async def _running(stopped: Monitor) -> Guest:
    await stopped.thaw()
    channel = await connected(stopped)
    state = await channel.reset()
    return Guest(stopped, channel, _NOBODYS, frozenset(state.jobs))


async def connected(vm: Monitor) -> GuestChannel:
    """A channel to a machine's agent, to which nothing has been said.

    Raises:
        VmmError: the monitor makes no connection.
    """
    reader, writer = await asyncio.open_unix_connection(sock=await vm.agent())
    return GuestChannel(reader, writer)


def _identity(name: str, *, generation: int) -> Identity:
    token = secrets.token_bytes(_TOKEN_BYTES)
    if generation > 1:
        # Its names stay what they are: for the environment nothing has happened.
        return Identity(env_id=name, token=token, generation=generation)
    return Identity(
        env_id=name,
        token=token,
        generation=generation,
        hostname=name[:63],
        machine_id=secrets.token_bytes(16),
    )
