"""Deltas: save a running clone as its differences to the template, and restore it.

A delta is always against the template, so a fork of a fork is no deeper than the first clone.
"""

import asyncio
import contextlib
import os
import time
from functools import partial
from pathlib import Path

from etude.envserver.drivers.vm import disk as disks
from etude.envserver.drivers.vm import sealed_files
from etude.envserver.drivers.vm.dirty_pages import PAGE_BYTES, PageBuffer, read_dirty_pages
from etude.envserver.drivers.vm.disk import DiskContent
from etude.envserver.drivers.vm.errors import FormatError, VmmError
from etude.envserver.drivers.vm.interface import VmDelta
from etude.envserver.drivers.vm.qemu.booted_state import BootedState
from etude.envserver.drivers.vm.qemu.migration import device_state, receive, send
from etude.envserver.drivers.vm.qemu.stream_splicing import TemplateStream, splice
from etude.envserver.drivers.vm.qemu.vm import QemuVm


async def save_delta(
    vm: QemuVm,
    template: BootedState,
    buffer: PageBuffer,
    *,
    keep_running: bool,
    disk: Path,
) -> VmDelta:
    """Save a clone. It is paused for milliseconds, or stays paused unless `keep_running`.

    The caller has brought its channel to a boundary between two frames. A clone that goes on is
    paused for seconds more for each GiB on its disk, unless the file system shares blocks.

    Raises:
        VmmError: the monitor failed.
    """
    pause = GuestPause(vm, keep_running=keep_running, disk=disk)
    match template.stream:
        case TemplateStream() as stream:
            return await _save_dirty_pages(pause, template, stream, buffer)
        case FormatError():
            return await save_full(pause, template)


async def save_full(pause: "GuestPause", template: BootedState) -> VmDelta:
    """Save a clone with all of its memory, by QEMU's own migration. It is paused meanwhile.

    Raises:
        VmmError: the monitor failed.
    """
    with contextlib.ExitStack() as opened:
        stream = sealed_files.create("full")
        opened.callback(os.close, stream)
        async with pause:
            await send(pause.vm, stream, leaves_memory=False)
            await pause.save_disk(opened)
        saved_disk = pause.finish_disk(opened)
        sealed_files.seal(stream)
        opened.pop_all()
    return VmDelta(
        template=template.address,
        is_full=True,
        stream=stream,
        changed_bytes=template.machine.memory_bytes,
        pause_s=pause.took_s,
        disk=saved_disk,
    )


class GuestPause:
    """Pause of a guest, its disk of that moment, and the time that it took."""

    def __init__(self, vm: QemuVm, *, keep_running: bool, disk: Path) -> None:
        self.vm = vm
        self.took_s = 0.0
        self._keep_running, self._disk = keep_running, disk
        self._saved: int | DiskContent | None = None
        self._began_s = 0.0

    async def __aenter__(self) -> None:
        self._began_s = time.perf_counter()
        await self.vm.freeze()

    async def save_disk(self, opened: contextlib.ExitStack) -> None:
        """Save the disk while the guest is paused, as a file that the stack closes.

        Raises:
            CancelledError: the caller was cancelled; no file is left open.
            VmmError: the host's disk has no room.
        """
        if not self._keep_running:
            # It leaves its disk to the saved state.
            self._saved = disks.link(self.vm.folder, self._disk)
        else:
            # What is small is written once the guest goes on.
            self._saved = disks.read_small(self.vm.folder) or await self._copy_disk()
        if isinstance(self._saved, int):
            opened.callback(os.close, self._saved)

    def finish_disk(self, opened: contextlib.ExitStack) -> int:
        """Return the saved disk, open, once the guest goes on.

        Raises:
            VmmError: the host's disk has no room, or the disk was not saved.
        """
        match self._saved:
            case None:
                raise VmmError(f"the disk of VM {self.vm.pid} was not saved")
            case int(saved):
                return saved
            case content:
                written = disks.write(content, self._disk)
                opened.callback(os.close, written)
                return written

    async def _copy_disk(self) -> int:
        copy = partial(disks.copy, self.vm.folder, self._disk)
        copying = asyncio.create_task(asyncio.to_thread(copy), name="copy a disk")
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait([copying])
            if not copying.cancelled() and copying.exception() is None:
                os.close(copying.result())
            raise

    async def __aexit__(self, *error: object) -> None:
        if self._keep_running:
            await self.vm.thaw()
        self.took_s = time.perf_counter() - self._began_s


async def restore_delta(shell: QemuVm, template: BootedState, delta: VmDelta) -> None:
    """Restore a delta in an idle VMM of the same template, paused.

    Raises:
        VmmError: the delta belongs to another template, or QEMU refused it.
    """
    if delta.template != template.address:
        raise VmmError(f"the delta is of template {delta.template}, not {template.address}")
    fill = partial(disks.fill_in, shell.folder, delta.disk)
    await disks.run_copy(fill, disks.used_bytes(delta.disk))
    with sealed_files.reopen(delta.stream, delta.offset) as source:
        await receive(shell, source, has_memory=delta.is_full)


async def _save_dirty_pages(
    pause: GuestPause, template: BootedState, stream: TemplateStream, buffer: PageBuffer
) -> VmDelta:
    async with buffer.lock:
        state = await device_state(pause.vm)
        with contextlib.ExitStack() as opened:
            try:
                async with pause:
                    await state.save()
                    # On this thread: the switch to another one takes longer than the read.
                    pages = read_dirty_pages(pause.vm.pid, template.memory, buffer)
                    await pause.save_disk(opened)
                saved_disk = pause.finish_disk(opened)
                saved = sealed_files.create_sealed("delta", splice(stream, state.content(), pages))
            finally:
                await state.close()
            opened.pop_all()
    return VmDelta(
        template=template.address,
        is_full=False,
        stream=saved,
        changed_bytes=len(pages.numbers) * PAGE_BYTES,
        pause_s=pause.took_s,
        disk=saved_disk,
    )
