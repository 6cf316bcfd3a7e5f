"""Firecracker template: boot of an image, clones, deltas.

<folder>/memory   the guest's memory, without its pages of zeros
        /vmstate  processor and devices
        /root.sqsh
        /disk     what it has written
A clone has hard links to these files in its jail, or a memory of its own where it restores a delta,
and always a disk of its own.
A delta is always against the template: Firecracker's snapshots hold the changes since the one
before, which are merged here.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from etude.common import atomic
from etude.common.errors import CorruptError, crossing
from etude.envserver.drivers.process_identity import ProcessId
from etude.envserver.drivers.vm import sealed_files, vm_record
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import (
    api_requests,
    jail,
    jail_disks,
    memory_files,
    vm,
)
from etude.envserver.drivers.vm.firecracker.api_requests import (
    DISK,
    MEMORY,
    ROOT,
    STATE,
    FirecrackerConfig,
)
from etude.envserver.drivers.vm.firecracker.jail import FirecrackerJail
from etude.envserver.drivers.vm.firecracker.vm import FirecrackerVm, HostContext
from etude.envserver.drivers.vm.guest_vm import BOOT_LIMIT_S, prepare_template
from etude.envserver.drivers.vm.interface import VmDelta, Vmm, VmTemplate, downcast
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.template_cache import template_address
from etude.envserver.drivers.vm.uid_pool import UidPool
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.images.built_image import BuiltImage

MAX_PENDING = 16
"""A diff is merged as soon as it is written; others come from a failure or a dead process."""
_NOTE = "diffs"


@dataclass(frozen=True, slots=True)
class PendingDiffs:
    """Diffs of one VM that were not merged yet."""

    folder: Path
    """Folder of the VM; private to the host."""

    def add(self) -> str:
        """Record the next diff, and return its name.

        Raises:
            VmmError: what was noted cannot be read.
        """
        asked = self._load()
        self._save(range(asked.start, asked.stop + 1))
        return _name(asked.stop)

    def pending(self) -> list[str]:
        """List the recorded diffs, oldest first."""
        return [_name(number) for number in self._load()]

    def remove_oldest(self) -> None:
        asked = self._load()
        self._save(range(asked.start + 1, asked.stop))

    def _load(self) -> range:
        try:
            first, behind = map(int, (self.folder / _NOTE).read_text().split())
        except FileNotFoundError:
            return range(0)
        except (OSError, ValueError) as cause:
            raise VmmError(f"{self.folder / _NOTE}: {cause}") from cause
        return range(first, behind)

    def _save(self, asked: range) -> None:
        atomic.write_text(self.folder / _NOTE, f"{asked.start} {asked.stop}")


def _name(number: int) -> str:
    return f"diff-{number}"


SNAPSHOT_LIMIT_S = 300.0
"""For a full memory on a slow disk."""
_MAX_STATE_BYTES = 16 << 20
_SAVED = "saved-vmstate"
"""Device state that a VM writes; the name it was loaded from is the template's file."""
_CHANGED = "changed"
"""File in a VM's folder: differences to the template, as far as they were saved."""
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FirecrackerTemplate(VmTemplate):
    """Saved state of a booted VM."""

    # Fields of their own, without the protocol's property as default.
    address: str = field()
    compat_key: str = field()
    machine: FirecrackerConfig
    folder: Path
    """Folder of its immutable files."""
    context: HostContext
    uids: UidPool

    @override
    async def spawn(self, folder: Path, jail: Jail) -> FirecrackerVm:
        return await start_vmm(
            self.machine, self.context, self.uids, folder=folder, template=self.address
        )

    @override
    async def restore(self, shell: Vmm, saved: VmDelta | None) -> None:
        found = downcast(shell, FirecrackerVm)
        try:
            await asyncio.to_thread(self._add_files, found, saved)
            await found.api.put(*api_requests.load(), limit_s=SNAPSHOT_LIMIT_S)
            await _check_stopped(found)
        except (OSError, CorruptError) as cause:
            await found.destroy()
            raise VmmError(f"the VM's files cannot be restored: {cause}") from cause
        except BaseException:
            await found.destroy()
            raise

    @override
    async def save(self, vm: Vmm, buffer: PageBuffer, *, keep_running: bool, disk: Path) -> VmDelta:
        found = downcast(vm, FirecrackerVm)
        async with found.snapshot_lock:
            name = await asyncio.to_thread(self._next_diff, found)
            with contextlib.ExitStack() as opened:
                began_s = time.perf_counter()
                await found.freeze()
                try:
                    put = api_requests.create("Diff", state=_SAVED, memory=name)
                    await found.api.put(*put, limit_s=SNAPSHOT_LIMIT_S)
                    copy = partial(jail_disks.copy_disk, found.jail, self.machine, disk)
                    copied = await asyncio.to_thread(copy)
                    opened.callback(os.close, copied)
                finally:
                    if keep_running:
                        await found.thaw()
                pause_s = time.perf_counter() - began_s
                packed = await asyncio.to_thread(self._packed, found, name, copied)
                opened.pop_all()
            return replace(packed, pause_s=pause_s)

    @override
    async def adopt(self, folder: Path, process: ProcessId) -> FirecrackerVm:
        """Adopt a VMM that an earlier process of this host started; its guest runs."""
        found = await vm.adopt(self.machine, self.context.programs, folder, process)
        noted = vm_record.load(folder)
        if noted is not None:
            _release_at_exit(found, self.uids, noted.uid)
        try:
            # A frozen guest accepts no connections.
            await found.thaw()
        except BaseException:
            await found.kill()
            raise
        return found

    @override
    def close(self) -> None:
        """Do nothing: its files stay for the next process."""

    def _add_files(self, found: FirecrackerVm, saved: VmDelta | None) -> None:
        if saved is not None and saved.template != self.address:
            raise VmmError(f"the delta is of template {saved.template}, not {self.address}")
        cell = found.jail
        jail.add_file(cell, ROOT, self.folder / ROOT)
        jail_disks.add_disk(cell, self.folder, saved)
        if saved is None:
            jail.add_file(cell, MEMORY, self.folder / MEMORY)
            jail.add_file(cell, STATE, self.folder / STATE)
            return
        size = self.machine.memory_bytes
        stream = memory_files.decode_delta(saved.stream, saved.offset, memory_bytes=size)
        changed = found.folder / _CHANGED
        with changed.open("xb") as file:
            file.truncate(size)
            memory_files.merge(file.fileno(), stream.parts)
        with changed.open("rb") as file:
            parts = memory_files.data_parts(file.fileno())
            memory_files.copy_with_changes(self.folder / MEMORY, cell.root / MEMORY, parts)
        (cell.root / STATE).write_bytes(stream.state)
        (cell.root / STATE).chmod(0o444)

    def _next_diff(self, found: FirecrackerVm) -> str:
        """Record a new diff, and merge earlier ones if there are too many."""
        diffs = PendingDiffs(found.folder)
        with crossing(VmmError, f"VM {found.pid} cannot be saved"):
            if len(diffs.pending()) >= MAX_PENDING:
                os.close(_merge_diffs(found.jail, self.machine.memory_bytes))
            return diffs.add()

    def _packed(self, found: FirecrackerVm, name: str, copied: int) -> VmDelta:
        """Encode the new and all earlier diffs as one stream.

        Raises:
            VmmError: the VMM has not written them.
        """
        try:
            with contextlib.ExitStack() as stack:
                changed = _merge_diffs(found.jail, self.machine.memory_bytes, name)
                stack.callback(os.close, changed)
                state = _state(found, _SAVED)
                stream = sealed_files.create_sealed(
                    "delta", memory_files.encode_delta(state, changed)
                )
                num_bytes = os.fstat(changed).st_blocks * 512
        except OSError as cause:
            raise VmmError(f"VM {found.pid} cannot be saved: {cause}") from cause
        return VmDelta(
            template=self.address,
            is_full=False,
            stream=stream,
            changed_bytes=num_bytes,
            disk=copied,
        )


async def start_vmm(
    machine: FirecrackerConfig,
    ground: HostContext,
    users: UidPool,
    *,
    folder: Path,
    template: str = "",
) -> FirecrackerVm:
    """Start a VMM with a user id of its own, which is freed once it has ended."""
    uid = users.take()
    try:
        made = await vm.start(machine, ground, folder=folder, uid=uid, template=template)
    except BaseException:
        users.give(uid)
        raise
    _release_at_exit(made, users, uid)
    return made


def _release_at_exit(found: FirecrackerVm, users: UidPool, uid: int) -> None:
    """Free its user id and remove its control group once it has ended."""
    group, vm_id = found.programs.firecracker.name, found.jail.vm_id

    def on_exit() -> None:
        users.give(uid)
        jail.remove_cgroups(group, vm_id)

    found.exited.add_done_callback(lambda _: on_exit())


async def boot_template(
    image: BuiltImage,
    kernel: Path,
    running: FirecrackerVm,
    *,
    target: Path,
    warm_up: Callable[[GuestChannel], Awaitable[None]],
) -> None:
    """Boot a VM until its agent answers, prewarm it, and write its files; it ends."""
    try:
        for name, source in {
            api_requests.KERNEL: kernel,
            api_requests.INITRAMFS: image.initramfs,
            ROOT: image.root,
        }.items():
            await asyncio.to_thread(jail.add_file, running.jail, name, source)
        await asyncio.to_thread(jail_disks.format_disk, running.jail, running.machine)
        for put in api_requests.boot(running.machine):
            await running.api.put(*put)
        await prepare_template(await _first_connection(running), warm_up)
        await running.freeze()
        put = api_requests.create("Full", state=STATE, memory=MEMORY)
        await running.api.put(*put, limit_s=SNAPSHOT_LIMIT_S)
        await running.kill()
        await asyncio.to_thread(_copy_files, running, image, target)
    finally:
        await running.destroy()


def address(key: str, folder: Path) -> str:
    """Compute the address of a template from its files."""
    with (folder / MEMORY).open("rb") as file:
        state = (folder / STATE).read_bytes()
        return template_address(key, file.fileno(), state, jail_disks.disk_digest(folder))


async def _check_stopped(found: FirecrackerVm) -> None:
    if not await found.is_stopped():
        raise VmmError("a restored VM runs instead of being paused")


async def _first_connection(running: FirecrackerVm) -> GuestChannel:
    """Open a channel to the agent of a booting VM, once it listens.

    Raises:
        VmmError: it does not listen in time, or the VM has ended.
    """
    limit_s = time.monotonic() + BOOT_LIMIT_S
    while True:
        try:
            connection = await running.agent()
        except VmmError as error:
            if running.exited.done():
                raise VmmError(f"the VM ended while it booted: {error}") from error
            if time.monotonic() > limit_s:
                raise
            await asyncio.sleep(_LOOK_S)
        else:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            return GuestChannel(reader, writer)


def _copy_files(running: FirecrackerVm, image: BuiltImage, target: Path) -> None:
    size = running.machine.memory_bytes
    found = jail.open_file(running.jail, MEMORY, size_bytes=size)
    try:
        memory_files.copy_sparse(found, target / MEMORY)
    finally:
        os.close(found)
    (target / STATE).write_bytes(_state(running, STATE))
    (target / STATE).chmod(0o444)
    shutil.copyfile(image.root, target / ROOT)
    (target / ROOT).chmod(0o444)
    os.close(jail_disks.copy_disk(running.jail, running.machine, target / DISK))


def _state(found: FirecrackerVm, name: str) -> bytes:
    descriptor = jail.open_file(found.jail, name)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(_MAX_STATE_BYTES + 1)
    if len(data) > _MAX_STATE_BYTES:
        raise VmmError(f"the VM's device state has more than {_MAX_STATE_BYTES} bytes")
    return data


def _merge_diffs(cell: FirecrackerJail, memory_bytes: int, needed: str = "") -> int:
    """Merge all written diffs into the file of differences to the template, and open it.

    A failed request may have written none. A diff is removed once all of it is merged: after a
    crash the merge is repeated.
    """
    changed = os.open(cell.folder / _CHANGED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(changed, memory_bytes)
        diffs = PendingDiffs(cell.folder)
        for name in diffs.pending():
            if name == needed or os.path.lexists(cell.root / name):
                diff = jail.open_file(cell, name, size_bytes=memory_bytes)
                try:
                    memory_files.merge(changed, memory_files.data_parts(diff))
                finally:
                    os.close(diff)
                (cell.root / name).unlink()
            diffs.remove_oldest()
    except BaseException:
        os.close(changed)
        raise
    return changed
