"""Guest VMs whose agent answers: clones of a template with an identity of their own."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from etude.agent.workspace import WorkspaceError
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import VmDelta, Vmm, VmTemplate
from etude.envserver.drivers.vm.prewarm import warm_up_jit
from etude.envserver.guest.calls import GuestRequest
from etude.envserver.guest.channel import GuestChannel, GuestIdentity, GuestLostError
from etude.v1 import guest_pb2

BOOT_LIMIT_S = 120.0
"""A cold boot takes 2.4 CPU seconds under TCG, on a host that may have much else to run."""
_TOKEN_BYTES = 32
_READ = guest_pb2.GuestCall(read=guest_pb2.GuestRead(path="passwd"), cwd="/etc")
"""Read of a small file; an error is an answer too."""
_READ_LIMIT_S = 30.0
_SAVED_LIMIT_S = 2.0
"""For a saved guest, which may not answer while others wait."""
_NO_IDENTITY = GuestIdentity(env_id="", token=b"", generation=0)
"""Identity of templates: the agent refuses every call until a clone has its own."""


@dataclass(frozen=True, slots=True)
class GuestVm:
    """A VM and the channel to its agent."""

    vm: Vmm
    channel: GuestChannel
    identity: GuestIdentity
    """Identity of its last SYNC."""
    jobs: frozenset[int] = frozenset()
    """Background commands that ran when it was connected."""
    is_connected: bool = True
    """Whether this process has talked to its agent: an adopted, frozen VM waits."""

    async def destroy(self) -> None:
        await self.channel.close()
        await self.vm.destroy()


async def prepare_template(
    channel: GuestChannel, warm_up: Callable[[GuestChannel], Awaitable[None]]
) -> None:
    """Prepare a booting VM as a template: warm, without identity, its channel closed."""
    await channel.hello(timeout_s=BOOT_LIMIT_S)
    await channel.reset()
    await channel.sync(_new_identity("template", generation=0))
    await warm_up(channel)
    await channel.sync(_NO_IDENTITY)
    await channel.close()


async def start_clone(
    shell: Vmm,
    template: VmTemplate,
    *,
    name: str,
    saved: VmDelta | None = None,
    generation: int = 1,
) -> GuestVm:
    """Turn an idle VMM into a running clone that answers; the VMM is destroyed on failure.

    Args:
        shell: the idle VMM.
        template: its template.
        name: its environment's id and host name.
        saved: the state to restore; None restores the template's.
        generation: above 1 it resumes and keeps its host name and machine id.

    Raises:
        GuestLostError: the agent does not answer.
    """
    identity = _new_identity(name, generation=generation)
    try:
        found = await _restore_and_run(shell, template, saved)
        await found.channel.sync(identity)
    except GuestLostError as error:
        error.add_note(await shell.console())
        await shell.destroy()
        raise
    except BaseException:
        await shell.destroy()
        raise
    return replace(found, identity=identity)


async def start_paused_clone(shell: Vmm, template: VmTemplate) -> GuestVm:
    """Turn an idle VMM into a paused clone: it has answered once, has no identity, and is frozen.

    The first execution of guest code is translated and costs ten times as much; here it is done.
    """
    return await _start_frozen(shell, template, None, _read_file(_READ_LIMIT_S), name="paused")


async def start_fork_parent(
    shell: Vmm, template: VmTemplate, saved: VmDelta | None = None
) -> GuestVm:
    """Turn an idle VMM into a warmed-up, frozen clone without identity, the parent of child VMs.

    Raises:
        VmmError: the VMM failed.
    """
    does = warm_up_jit if saved is None else _read_file(_SAVED_LIMIT_S)
    try:
        return await _start_frozen(shell, template, saved, does, name="rehearsal")
    except WorkspaceError as error:
        raise VmmError(f"JIT warm-up failed: {error}") from error


async def start_child(child: Vmm, *, name: str, generation: int = 1) -> GuestVm:
    """Resume a child VM under its own identity; it is destroyed on failure."""
    identity = _new_identity(name, generation=generation)
    try:
        found = await _run_frozen(child)
        await found.channel.sync(identity)
    except BaseException:
        await child.destroy()
        raise
    return replace(found, identity=identity)


async def resume_paused_clone(waiting: GuestVm, *, name: str) -> GuestVm:
    """Resume a paused clone under its own identity; it is destroyed on failure."""
    identity = _new_identity(name, generation=1)
    try:
        await waiting.vm.thaw()
        await waiting.channel.sync(identity)
    except BaseException:
        await waiting.destroy()
        raise
    return replace(waiting, identity=identity)


async def adopt_guest(vmm: Vmm, *, name: str, generation: int, is_stopped: bool) -> GuestVm:
    """Connect to the guest of an adopted VM. A frozen one is not resumed."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    identity = GuestIdentity(env_id=name, token=token, generation=generation)
    guest = GuestVm(vmm, await connect_agent(vmm), identity, is_connected=False)
    if is_stopped:
        return guest
    try:
        return await reset_guest(guest)
    except BaseException:
        await guest.channel.close()
        raise


async def reset_guest(guest: GuestVm) -> GuestVm:
    """Reset the running guest of an earlier process, and give it a token of this one."""
    state = await guest.channel.reset()
    await guest.channel.sync(guest.identity)
    return replace(guest, jobs=frozenset(state.jobs), is_connected=True)


async def reconnect_guest(guest: GuestVm) -> GuestVm:
    """Reconnect to a guest whose connection a snapshot has closed. It keeps its names and jobs."""
    await guest.channel.close()
    channel = await connect_agent(guest.vm)
    state = await channel.reset()
    await channel.sync(replace(guest.identity, hostname="", machine_id=b""))
    return replace(guest, channel=channel, jobs=frozenset(state.jobs), is_connected=True)


async def _start_frozen(
    shell: Vmm,
    base: VmTemplate,
    saved: VmDelta | None,
    does: Callable[[GuestChannel], Awaitable[None]],
    *,
    name: str,
) -> GuestVm:
    """Turn an idle VMM into a clone that has done something and is frozen, without identity."""
    try:
        found = await _restore_and_run(shell, base, saved)
        await found.channel.sync(_new_identity(name, generation=0 if saved is None else 2))
        await does(found.channel)
        await found.channel.sync(_NO_IDENTITY)
        await shell.freeze()
    except BaseException:
        await shell.destroy()
        raise
    return found


def _read_file(limit_s: float) -> Callable[[GuestChannel], Awaitable[None]]:
    async def read(channel: GuestChannel) -> None:
        await channel.call(GuestRequest(operation=_READ, deadline_s=limit_s))

    return read


async def _restore_and_run(shell: Vmm, base: VmTemplate, saved: VmDelta | None) -> GuestVm:
    await base.restore(shell, saved)
    return await _run_frozen(shell)


async def _run_frozen(stopped: Vmm) -> GuestVm:
    await stopped.thaw()
    channel = await connect_agent(stopped)
    state = await channel.reset()
    return GuestVm(stopped, channel, _NO_IDENTITY, frozenset(state.jobs))


async def connect_agent(vm: Vmm) -> GuestChannel:
    """Open a channel to a VM's agent.

    Raises:
        VmmError: the VMM makes no connection.
    """
    reader, writer = await asyncio.open_unix_connection(sock=await vm.agent())
    return GuestChannel(reader, writer)


def _new_identity(name: str, *, generation: int) -> GuestIdentity:
    token = secrets.token_bytes(_TOKEN_BYTES)
    if generation > 1:
        # Host name and machine id stay: the environment does not notice the resume.
        return GuestIdentity(env_id=name, token=token, generation=generation)
    return GuestIdentity(
        env_id=name,
        token=token,
        generation=generation,
        hostname=name[:63],
        machine_id=secrets.token_bytes(16),
    )
