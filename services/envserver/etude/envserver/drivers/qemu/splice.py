"""Splicing of a delta's stream: the template's, with changed pages and another device state."""

import struct
from collections.abc import Iterator

from etude.envserver.drivers.machines.errors import FormatError
from etude.envserver.drivers.machines.pages import PAGE_BYTES, Pages
from etude.envserver.drivers.qemu.stream import (
    FLAG_CONTINUE,
    FLAG_EOS,
    FLAG_PAGE,
    MAGIC,
    SECTION_PART,
    TemplateStream,
    device_sections,
    footer,
)


def splice(
    template: TemplateStream, device_state: bytes, pages: Pages
) -> Iterator[bytes | memoryview]:
    """Splice a stream that restores a VM on the template's memory.

    Args:
        template: the template's stream.
        device_state: output of `xen-save-devices-state` for the VM.
        pages: every page of its memory that differs from the template's.

    Raises:
        FormatError: one of them is not in QEMU 7.2's format, or a page lies outside the memory.
    """
    devices = device_sections(template, device_state)
    if pages.numbers and pages.numbers[-1] >= template.memory_bytes // PAGE_BYTES:
        raise FormatError(f"page {pages.numbers[-1]} lies outside the memory")
    data = memoryview(template.data)
    yield data[: template.setup_end]
    if pages.numbers:
        yield from _section(template, pages)
    yield data[template.setup_end : devices]
    yield memoryview(device_state)[len(MAGIC) :]


def _section(template: TemplateStream, pages: Pages) -> Iterator[bytes | memoryview]:
    yield struct.pack(">BI", SECTION_PART, template.section_id)
    name = bytes([len(template.block)]) + template.block
    for index, number in enumerate(pages.numbers):
        offset = number * PAGE_BYTES
        yield (
            struct.pack(">Q", offset | FLAG_PAGE | FLAG_CONTINUE)
            if index
            else struct.pack(">Q", offset | FLAG_PAGE) + name
        )
        yield pages.content[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
    yield struct.pack(">Q", FLAG_EOS) + footer(template.section_id)
