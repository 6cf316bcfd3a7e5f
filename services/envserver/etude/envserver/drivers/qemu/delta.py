"""Saving a clone while it runs, as what differs from its template; making machines of it again.

A delta is always against the template, so a fork of a fork is no deeper than the first clone.
"""

import os
import time
from dataclasses import dataclass

from etude.envserver.drivers.qemu import sealed
from etude.envserver.drivers.qemu.errors import FormatError, VmmError
from etude.envserver.drivers.qemu.machine import PAGE_BYTES
from etude.envserver.drivers.qemu.migration import device_state, receive, send
from etude.envserver.drivers.qemu.pages import PageBuffer, changed_pages
from etude.envserver.drivers.qemu.splice import splice
from etude.envserver.drivers.qemu.stream import TemplateStream
from etude.envserver.drivers.qemu.template import Template
from etude.envserver.drivers.qemu.vm import Vm


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The saved state of one machine. It owns its file descriptor."""

    template: str
    """Address of the template that it belongs to."""
    is_full: bool
    """Whether it holds all of the memory, because a smaller one is not possible."""
    stream: int
    """A file that nobody changes."""
    offset: int = 0
    """Where in it the stream begins, in bytes."""
    changed_bytes: int
    """Of the guest's memory."""
    pause_s: float = 0.0
    """How long the guest stood still for it."""

    def close(self) -> None:
        """Give the file back."""
        os.close(self.stream)


async def take(vm: Vm, template: Template, buffer: PageBuffer, *, keep_running: bool) -> Delta:
    """Save a clone. It stands still for milliseconds, or stays stopped if it is not to go on.

    The caller has brought its channel to a point between two frames.

    Raises:
        VmmError: the monitor failed.
    """
    match template.stream:
        case TemplateStream() as stream:
            return await _take_pages(vm, template, stream, buffer, keep_running=keep_running)
        case FormatError():
            return await take_full(vm, template, keep_running=keep_running)


async def take_full(vm: Vm, template: Template, *, keep_running: bool) -> Delta:
    """Save a clone with all of its memory, in the monitor's own way. It stands still meanwhile.

    Raises:
        VmmError: the monitor failed.
    """
    stream = sealed.create("full")
    began_s = time.perf_counter()
    try:
        await vm.freeze()
        await send(vm, stream, leaves_memory=False)
        if keep_running:
            await vm.thaw()
        pause_s = time.perf_counter() - began_s
        sealed.seal(stream)
    except BaseException:
        os.close(stream)
        raise
    return Delta(
        template=template.address,
        is_full=True,
        stream=stream,
        changed_bytes=template.machine.memory_bytes,
        pause_s=pause_s,
    )


async def restore(shell: Vm, template: Template, delta: Delta) -> None:
    """Make a shell of the same template the saved machine, paused.

    Raises:
        VmmError: the delta is another template's, or the monitor refused it.
    """
    if delta.template != template.address:
        raise VmmError(f"the delta is of template {delta.template}, not {template.address}")
    with sealed.opened(delta.stream, delta.offset) as source:
        await receive(shell, source, has_memory=delta.is_full)


async def _take_pages(
    vm: Vm, template: Template, stream: TemplateStream, buffer: PageBuffer, *, keep_running: bool
) -> Delta:
    async with buffer.lock:
        state = await device_state(vm)
        try:
            began_s = time.perf_counter()
            await vm.freeze()
            try:
                await state.save()
                # On this thread: another one would be waited for longer than the reading takes.
                pages = changed_pages(vm.pid, template.memory, buffer)
            finally:
                if keep_running:
                    await vm.thaw()
            pause_s = time.perf_counter() - began_s
            pieces = splice(stream, state.content(), pages)
            saved = sealed.filled("delta", pieces)
        finally:
            await state.close()
    return Delta(
        template=template.address,
        is_full=False,
        stream=saved,
        changed_bytes=len(pages.numbers) * PAGE_BYTES,
        pause_s=pause_s,
    )
