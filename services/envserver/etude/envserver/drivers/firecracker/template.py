"""From an image to a template, and from a template to machines: files that jails get names of.

<folder>/memory   the guest's memory, without its pages of zeros
        /vmstate  processor and devices
        /root.sqsh
Each machine has a second name of these files in its jail, or a memory of its own where it takes up
a delta. A delta is always against the template: what Firecracker writes at a snapshot is what
changed since the one before, and is put together with that here.
"""

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from etude.common.errors import CorruptError
from etude.envserver.drivers.firecracker import bodies, cgroups, jail, memory, vm
from etude.envserver.drivers.firecracker.bodies import MEMORY, ROOT, STATE, FireMachine
from etude.envserver.drivers.firecracker.owners import Users
from etude.envserver.drivers.firecracker.vm import FireVm, Ground
from etude.envserver.drivers.machines import Monitor
from etude.envserver.drivers.qemu import record, sealed
from etude.envserver.drivers.qemu.delta import Delta
from etude.envserver.drivers.qemu.errors import VmmError
from etude.envserver.drivers.qemu.guests import BOOT_LIMIT_S, warmed
from etude.envserver.drivers.qemu.identity import ProcessId
from etude.envserver.drivers.qemu.jail import Jail
from etude.envserver.drivers.qemu.pages import PageBuffer
from etude.envserver.drivers.qemu.template import address_of
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.images.build import Image

SNAPSHOT_LIMIT_S = 300.0
"""A full memory on a slow disk."""
_MAX_STATE_BYTES = 16 << 20
_SAVED = "saved-vmstate"
"""What a machine writes: the name of what it was loaded from is the template's file."""
_CHANGED = "changed"
"""In a machine's folder: what differs from the template, as far as it was saved."""
_DIFF = re.compile(r"diff-(\d{1,18})")
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FireTemplate:
    """The saved state of a machine that has booted."""

    address: str
    """Digest of memory, devices and of what they run on: deltas name the template by it."""
    compat_key: str
    machine: FireMachine
    folder: Path
    """With its files, which do not change."""
    ground: Ground
    users: Users

    async def spawn(self, folder: Path, jail: Jail) -> FireVm:
        """A monitor that waits for the template's state or for a delta of it."""
        return await spawned(
            self.machine, self.ground, self.users, folder=folder, template=self.address
        )

    async def restore(self, shell: Monitor, saved: Delta | None) -> None:
        """Make a waiting monitor the template's machine, or the saved one, paused.

        Raises:
            VmmError: the state was refused; the shell is gone.
        """
        found = own(shell)
        try:
            await asyncio.to_thread(self._furnish, found, saved)
            await found.api.put(*bodies.load(), limit_s=SNAPSHOT_LIMIT_S)
            await _check_stopped(found)
        except (OSError, CorruptError) as cause:
            await found.destroy()
            raise VmmError(f"the machine's files cannot be put together: {cause}") from cause
        except BaseException:
            await found.destroy()
            raise

    async def take(self, vm: Monitor, buffer: PageBuffer, *, keep_running: bool) -> Delta:
        """Save a machine that was made of it."""
        found = own(vm)
        async with found.taking:
            began_s = time.perf_counter()
            await found.freeze()
            try:
                put = bodies.create("Diff", state=_SAVED, memory=_next_diff(found))
                await found.api.put(*put, limit_s=SNAPSHOT_LIMIT_S)
            finally:
                if keep_running:
                    await found.thaw()
            pause_s = time.perf_counter() - began_s
            return await asyncio.to_thread(self._packed, found, pause_s)

    async def adopt(self, folder: Path, process: ProcessId) -> FireVm:
        """Take up a monitor that an earlier process of this node started; its guest runs."""
        found = await vm.adopt(self.machine, self.ground.programs, folder, process)
        noted = record.load(folder)
        if noted is not None:
            _watch(found, self.users, noted.uid)
        try:
            # To a guest that stands still nothing can be connected.
            await found.thaw()
        except BaseException:
            await found.kill()
            raise
        return found

    def close(self) -> None:
        """Nothing: its files stay for the next process."""

    def _furnish(self, found: FireVm, saved: Delta | None) -> None:
        if saved is not None and saved.template != self.address:
            raise VmmError(f"the delta is of template {saved.template}, not {self.address}")
        cell = found.cell
        jail.place(cell, ROOT, self.folder / ROOT)
        if saved is None:
            jail.place(cell, MEMORY, self.folder / MEMORY)
            jail.place(cell, STATE, self.folder / STATE)
            return
        size = self.machine.memory_bytes
        stream = memory.unpacked(saved.stream, saved.offset, memory_bytes=size)
        changed = found.folder / _CHANGED
        with changed.open("xb") as file:
            file.truncate(size)
            memory.merge(file.fileno(), stream.parts)
        with changed.open("rb") as file:
            parts = memory.written(file.fileno())
            memory.cloned(self.folder / MEMORY, cell.root / MEMORY, parts)
        (cell.root / STATE).write_bytes(stream.state)
        (cell.root / STATE).chmod(0o444)

    def _packed(self, found: FireVm, pause_s: float) -> Delta:
        """What the monitor has written, and what it wrote before, as one stream.

        Raises:
            VmmError: it has not written what it should.
        """
        try:
            with contextlib.ExitStack() as stack:
                changed = _put_together(found, self.machine.memory_bytes)
                stack.callback(os.close, changed)
                state = _state(found, _SAVED)
                stream = sealed.filled("delta", memory.packed(state, changed))
                num_bytes = os.fstat(changed).st_blocks * 512
        except OSError as cause:
            raise VmmError(f"machine {found.pid} cannot be saved: {cause}") from cause
        return Delta(
            template=self.address,
            is_full=False,
            stream=stream,
            changed_bytes=num_bytes,
            pause_s=pause_s,
        )


async def spawned(
    machine: FireMachine, ground: Ground, users: Users, *, folder: Path, template: str = ""
) -> FireVm:
    """A monitor of a user of its own, which is another's again once it has ended.

    Raises:
        VmmError: it did not start.
    """
    uid = users.take()
    try:
        made = await vm.start(machine, ground, folder=folder, uid=uid, template=template)
    except BaseException:
        users.give(uid)
        raise
    _watch(made, users, uid)
    return made


def _watch(found: FireVm, users: Users, uid: int) -> None:
    """Once it has ended, let its user be another's, and remove its control group."""
    group, vm_id = found.programs.firecracker.name, found.cell.vm_id

    def ended() -> None:
        users.give(uid)
        cgroups.remove(group, vm_id)

    vm.when_ended(found, ended)


async def booted(
    image: Image,
    kernel: Path,
    running: FireVm,
    *,
    target: Path,
    warm_up: Callable[[GuestChannel], Awaitable[None]],
) -> None:
    """Boot a machine until its agent answers, warm it up, and write its files; it ends.

    Args:
        image: what it boots.
        kernel: the image's kernel, as Firecracker loads it.
        running: a monitor that has just started.
        target: an empty folder for the template's files.
        warm_up: does what clones shall find done.

    Raises:
        GuestLostError: the agent does not answer.
        VmmError: the monitor failed.
        OSError: a file cannot be written.
    """
    try:
        for name, source in {
            bodies.KERNEL: kernel,
            bodies.INITRAMFS: image.initramfs,
            ROOT: image.root,
        }.items():
            await asyncio.to_thread(jail.place, running.cell, name, source)
        for put in bodies.boot(running.machine):
            await running.api.put(*put)
        await warmed(await _first_connection(running), warm_up)
        await running.freeze()
        put = bodies.create("Full", state=STATE, memory=MEMORY)
        await running.api.put(*put, limit_s=SNAPSHOT_LIMIT_S)
        await running.kill()
        await asyncio.to_thread(_keep, running, image, target)
    finally:
        await running.destroy()


def address(key: str, folder: Path) -> str:
    """The address of a template with these files.

    Raises:
        OSError: they cannot be read.
    """
    with (folder / MEMORY).open("rb") as file:
        return address_of(key, file.fileno(), (folder / STATE).read_bytes())


def own(monitor: Monitor) -> FireVm:
    """A machine of this driver.

    Raises:
        VmmError: it is another driver's.
    """
    if not isinstance(monitor, FireVm):
        raise VmmError(f"machine {monitor.pid} is another driver's")
    return monitor


async def _check_stopped(found: FireVm) -> None:
    if not await found.is_stopped():
        raise VmmError("a restored machine runs instead of standing still")


async def _first_connection(running: FireVm) -> GuestChannel:
    """A channel to the agent of a machine that boots, once it listens.

    Raises:
        VmmError: it does not listen in time, or the machine ended.
    """
    limit_s = time.monotonic() + BOOT_LIMIT_S
    while True:
        try:
            connection = await running.agent()
        except VmmError as error:
            if running.exited.done():
                raise VmmError(f"the machine ended while it booted: {error}") from error
            if time.monotonic() > limit_s:
                raise
            await asyncio.sleep(_LOOK_S)
        else:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            return GuestChannel(reader, writer)


def _keep(running: FireVm, image: Image, target: Path) -> None:
    size = running.machine.memory_bytes
    found = jail.opened(running.cell, MEMORY, size_bytes=size)
    try:
        memory.sparse(found, target / MEMORY)
    finally:
        os.close(found)
    (target / STATE).write_bytes(_state(running, STATE))
    (target / STATE).chmod(0o444)
    shutil.copyfile(image.root, target / ROOT)
    (target / ROOT).chmod(0o444)


def _state(found: FireVm, name: str) -> bytes:
    descriptor = jail.opened(found.cell, name)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(_MAX_STATE_BYTES + 1)
    if len(data) > _MAX_STATE_BYTES:
        raise VmmError(f"the machine's device state has more than {_MAX_STATE_BYTES} bytes")
    return data


def _diffs(found: FireVm) -> list[str]:
    """Diffs in the jail, oldest first."""
    names = (_DIFF.fullmatch(path.name) for path in found.cell.root.iterdir())
    numbers = sorted(int(match[1]) for match in names if match)
    return [f"diff-{number}" for number in numbers]


def _next_diff(found: FireVm) -> str:
    """A name for the next diff, after those that nobody has put together yet."""
    last = _diffs(found)[-1:]
    first = int(last[0].partition("-")[2]) + 1 if last else 0
    names = (f"diff-{number}" for number in itertools.count(first))
    return next(name for name in names if not (found.cell.root / name).exists())


def _put_together(found: FireVm, memory_bytes: int) -> int:
    """The file of what differs from the template, with every diff in it that was written.

    A diff goes when all of it is there: whoever comes after a death does the same again.

    Raises:
        VmmError: a diff is none.
        OSError: it cannot be written.
    """
    changed = os.open(found.folder / _CHANGED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(changed, memory_bytes)
        for name in _diffs(found):
            diff = jail.opened(found.cell, name, size_bytes=memory_bytes)
            try:
                memory.merge(changed, memory.written(diff))
            finally:
                os.close(diff)
            (found.cell.root / name).unlink()
    except BaseException:
        os.close(changed)
        raise
    return changed
