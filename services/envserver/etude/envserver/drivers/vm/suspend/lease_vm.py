"""VM of one lease: freeze, suspend to disk, resume, copy.

While a suspended state is on disk, it is the VM: it is written before the VMM ends, and removed
before the next VMM's guest gets a call.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from typing_extensions import override

from etude.common.errors import CorruptError
from etude.envserver import metrics
from etude.envserver.drivers.base import SandboxStart
from etude.envserver.drivers.running_jobs import RunningJobs
from etude.envserver.drivers.vm import delta_file, guest_vm, vm_record
from etude.envserver.drivers.vm import disk as disks
from etude.envserver.drivers.vm.delta_file import VerifiedFiles
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.guest_vm import GuestVm
from etude.envserver.drivers.vm.interface import VmDelta
from etude.envserver.drivers.vm.start.start_scheduler import RunSlots
from etude.envserver.drivers.vm.start.starter import StartedVm, VmStarter
from etude.envserver.drivers.vm.suspend.auto_suspend import AutoSuspendingVm, SuspendableVm
from etude.envserver.drivers.vm.suspend.idle_policy import IdleTimeouts, PowerState
from etude.envserver.drivers.vm.vmm_processes import VM_FOLDER
from etude.envserver.egress.environment_egress import EnvironmentEgress
from etude.envserver.guest.calls import GuestReply, GuestRequest
from etude.envserver.guest.commands import guest_limits
from etude.envserver.guest.egress_listener import GuestEgressListener
from etude.envserver.storage.folders import TooLargeError
from etude.v1 import guest_pb2

_T = TypeVar("_T")

_FILE = re.compile(r"asleep\.(\d{1,18})")
_PING_LIMIT_S = 10.0
"""A guest answers in a millisecond; the machine may be busy."""
BUFFER_BYTES = 4 << 20
"""Initial size for a little-used clone; the buffer grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendStore:
    """Store of suspended VMs: authenticated files of this host."""

    key: bytes
    """Secret key that authenticates files written by this host."""
    buffer: PageBuffer
    verified: VerifiedFiles = field(default_factory=VerifiedFiles)


def suspended_file(lease: Path) -> Path | None:
    """Find the suspended VM's file of a lease; None if there is none."""
    try:
        found = [path for path in lease.iterdir() if _FILE.fullmatch(path.name)]
    except FileNotFoundError:
        return None
    return found[0] if found else None


class LeaseVm(SuspendableVm):
    """A clone of a template that serves one lease."""

    on_jobs: Callable[[int], None]

    def __init__(
        self,
        lease: Path,
        starter: Callable[[], VmStarter],
        store: SuspendStore,
        guest: GuestVm | None,
        gate: EnvironmentEgress | None = None,
    ) -> None:
        self._gate = gate
        self._egress: GuestEgressListener | None = None
        self._lease, self._starter, self._store = lease, starter, store
        self._guest = guest
        self._jobs = RunningJobs(guest.jobs if guest is not None else ())
        self.generation = guest.identity.generation if guest is not None else _generation(lease)
        self.on_jobs = lambda _: None
        if guest is not None:
            guest.channel.on_event = self._on_event
            if guest.is_connected:
                self._open_egress(guest)

    @override
    async def record_use(self) -> None:
        guest = self._in_memory
        try:
            await asyncio.to_thread(
                vm_record.record_use,
                guest.vm.folder,
                env_id=guest.identity.env_id,
                generation=guest.identity.generation,
            )
        except (OSError, CorruptError) as cause:
            raise VmmError(f"record of VM {guest.vm.pid} cannot be written: {cause}") from cause

    @override
    async def call(self, request: GuestRequest) -> GuestReply:
        call = request.operation
        with self._jobs.span_call(call):
            reply = await self._in_memory.channel.call(request)
            self._jobs.add_answer(call, reply.result)
        self.on_jobs(len(self._jobs.running))
        return reply

    @property
    @override
    def is_lost(self) -> bool:
        guest = self._guest
        if guest is None:
            return False
        return guest.vm.exited.done() or (guest.is_connected and guest.channel.is_lost)

    @override
    async def freeze(self) -> None:
        await self._in_memory.vm.freeze()

    @override
    async def thaw(self, *, sets_clock: bool) -> None:
        guest = self._in_memory
        await guest.vm.thaw()
        if not guest.is_connected:
            meet = guest_vm.reset_guest if guest.vm.keeps_channel else guest_vm.reconnect_guest
            self._continue_with(await meet(guest))
        elif sets_clock:
            # Host name and machine id stay, and are not written again.
            await guest.channel.sync(replace(guest.identity, hostname="", machine_id=b""))

    @override
    async def copy(self, path: Path, *, max_bytes: int) -> None:
        guest, base = self._in_memory, self._starter().template
        # After the answer the channel is at a frame boundary.
        if not await guest.channel.ping(timeout_s=_PING_LIMIT_S):
            raise VmmError(f"guest of VM {guest.vm.pid} does not answer")
        used_bytes = disks.used_in(guest.vm.disk_folder)
        if used_bytes > max_bytes:  # a copy would take the room that others need
            raise TooLargeError(f"the VM has a disk with {used_bytes} bytes")
        disk = path.parent / disks.PARTIAL
        try:
            saved = await base.save(guest.vm, self._store.buffer, keep_running=True, disk=disk)
        finally:
            if not guest.vm.keeps_channel:  # whether it was written or not
                self._continue_with(await guest_vm.reconnect_guest(guest))
        try:
            metrics.pause_seconds.observe(saved.pause_s)
            if saved.num_bytes > max_bytes:
                raise TooLargeError(f"the VM has {saved.num_bytes} bytes of changes")
            await _run_to_end(partial(delta_file.save, saved, path, key=self._store.key))
        finally:
            saved.close()

    @override
    async def save(self) -> None:
        guest, base = self._in_memory, self._starter().template
        if not guest.vm.keeps_channel:
            # If it cannot be written, it continues and is connected again.
            await guest.channel.close()
            guest = self._guest = replace(guest, is_connected=False)
        disk = self._lease / disks.PARTIAL
        saved = await base.save(guest.vm, self._store.buffer, keep_running=False, disk=disk)
        path = self._lease / f"asleep.{self.generation}"
        try:
            await _run_to_end(partial(delta_file.save, saved, path, key=self._store.key))
        finally:
            saved.close()
        await guest.destroy()
        self._guest = None

    @override
    async def restore(self) -> None:
        path = suspended_file(self._lease)
        if path is None:
            raise VmmError(f"suspended VM of lease {self._lease.name} has no file")
        name, folder = self._lease.name, self._lease / VM_FOLDER
        address = self._starter().template.address
        bed = self._store
        saved = await load_delta(
            partial(delta_file.load, path, key=bed.key, template=address, verified=bed.verified)
        )
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.generation += 1
            started = await self._starter().start(
                name, folder, saved=saved, generation=self.generation
            )
        finally:
            saved.close()
        self._guest = started.guest
        try:
            await self.record_use()
            path.unlink()
            disks.remove_kept(self._lease)
        except BaseException:
            self._guest = None
            await started.guest.destroy()
            raise
        self._continue_with(started.guest)

    @override
    def close_egress(self) -> None:
        self._gate = None
        if self._egress is not None:
            self._egress.close()

    @override
    async def destroy(self) -> None:
        self.close_egress()
        guest, self._guest = self._guest, None
        if guest is not None:
            await guest.destroy()

    @property
    def _in_memory(self) -> GuestVm:
        if self._guest is None:
            raise VmmError("the VM is not in memory")
        return self._guest

    def _continue_with(self, guest: GuestVm) -> None:
        """Continue with a guest as of its last RESET."""
        self._guest = guest
        self._jobs = RunningJobs(guest.jobs)
        guest.channel.on_event = self._on_event
        self._open_egress(guest)
        self.on_jobs(len(self._jobs.running))

    def _open_egress(self, guest: GuestVm) -> None:
        """Serve its egress connections; earlier ones ended with its last RESET."""
        if self._egress is not None:
            self._egress.close()
        self._egress = (
            GuestEgressListener(guest.channel, self._gate) if self._gate is not None else None
        )

    def _on_event(self, event: guest_pb2.GuestEvent) -> None:
        self._jobs.add_event(event)
        self.on_jobs(len(self._jobs.running))


class LaunchedVm(NamedTuple):
    """VM of a lease, and the kind of its start."""

    guest: AutoSuspendingVm
    sandbox_start: SandboxStart


@dataclass(frozen=True, slots=True, kw_only=True)
class VmContext:
    """Context of one lease's VM: how it is started, found again, suspended and resumed."""

    lease: Path
    start: Callable[[Path], Awaitable[StartedVm]]
    """Starts the VM in an empty folder."""
    starter: Callable[[], VmStarter]
    """Starter of its template; raises SandboxError while there is none."""
    suspend_store: SuspendStore
    run_slots: RunSlots
    idle_timeouts: IdleTimeouts
    gate: EnvironmentEgress | None = None
    image_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its image says."""
    limits: guest_pb2.GuestLimits = field(default_factory=guest_limits)
    """Limits of each command."""

    async def launch(self, folder: Path) -> LaunchedVm:
        """Start a VM that runs and answers, in an empty folder."""
        asked_s = time.monotonic()
        await self.run_slots.take()
        try:
            started = await self.start(folder)
        except BaseException:
            self.run_slots.give()
            raise
        begun = SandboxStart(started.kind, time.monotonic() - asked_s)
        return LaunchedVm(self._auto_suspending(started.guest), begun)

    def find(self, guest: GuestVm | None) -> AutoSuspendingVm | None:
        """Find the VM that an earlier process started; None if it started none."""
        path = suspended_file(self.lease)
        if guest is not None:
            # No call has come since its suspend, if there was one.
            if path is not None:
                path.unlink()
                disks.remove_kept(self.lease)
            if guest.is_connected:
                self.run_slots.take_now()
            return self._auto_suspending(guest)
        return self._auto_suspending(None) if path is not None else None

    def _auto_suspending(self, guest: GuestVm | None) -> AutoSuspendingVm:
        machine = LeaseVm(self.lease, self.starter, self.suspend_store, guest, self.gate)
        state = PowerState.SAVED
        if guest is not None:
            state = PowerState.RUNNING if guest.is_connected else PowerState.FROZEN
        return AutoSuspendingVm(machine, self.run_slots, state=state, timeouts=self.idle_timeouts)


def _generation(lease: Path) -> int:
    path = suspended_file(lease)
    match = _FILE.fullmatch(path.name) if path is not None else None
    return int(match[1]) if match else 0


async def load_delta(load: Callable[[], VmDelta]) -> VmDelta:
    """Load a saved VM on a thread.

    Raises:
        CancelledError: the caller was cancelled; no file is left open.
    """
    thread = asyncio.create_task(asyncio.to_thread(load), name="load a VM")
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        if not thread.cancelled() and thread.exception() is None:
            thread.result().close()
        raise


async def _run_to_end(work: Callable[[], _T]) -> _T:
    """Run on a thread; a cancelled caller waits for its end too, since it uses open files."""
    thread = asyncio.create_task(asyncio.to_thread(work), name="asleep")
    try:
        return await asyncio.shield(thread)
    finally:
        await asyncio.wait([thread])
