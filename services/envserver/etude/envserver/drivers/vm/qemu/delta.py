"""Deltas: save a running clone as its differences to the template, and restore it.

A delta is always against the template, so a fork of a fork is no deeper than the first clone.
"""

import os
import time

from etude.envserver.drivers.vm import sealed_files
from etude.envserver.drivers.vm.dirty_pages import PAGE_BYTES, PageBuffer, read_dirty_pages
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
) -> VmDelta:
    """Save a clone. It is paused for milliseconds, or stays paused unless `keep_running`.

    The caller has brought its channel to a boundary between two frames.

    Raises:
        VmmError: the monitor failed.
    """
    pause = GuestPause(vm, keep_running=keep_running)
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
    stream = sealed_files.create("full")
    try:
        async with pause:
            await send(pause.vm, stream, leaves_memory=False)
        sealed_files.seal(stream)
    except BaseException:
        os.close(stream)
        raise
    return VmDelta(
        template=template.address,
        is_full=True,
        stream=stream,
        changed_bytes=template.machine.memory_bytes,
        pause_s=pause.took_s,
    )


class GuestPause:
    """Pause of a guest, and the time that it took."""

    def __init__(self, vm: QemuVm, *, keep_running: bool) -> None:
        self.vm = vm
        self.took_s = 0.0
        self._keep_running = keep_running
        self._began_s = 0.0

    async def __aenter__(self) -> None:
        self._began_s = time.perf_counter()
        await self.vm.freeze()

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
    with sealed_files.reopen(delta.stream, delta.offset) as source:
        await receive(shell, source, has_memory=delta.is_full)


async def _save_dirty_pages(
    pause: GuestPause, template: BootedState, stream: TemplateStream, buffer: PageBuffer
) -> VmDelta:
    async with buffer.lock:
        state = await device_state(pause.vm)
        try:
            async with pause:
                await state.save()
                # On this thread: the switch to another one takes longer than the read.
                pages = read_dirty_pages(pause.vm.pid, template.memory, buffer)
            saved = sealed_files.create_sealed("delta", splice(stream, state.content(), pages))
        finally:
            await state.close()
    return VmDelta(
        template=template.address,
        is_full=False,
        stream=saved,
        changed_bytes=len(pages.numbers) * PAGE_BYTES,
        pause_s=pause.took_s,
    )
