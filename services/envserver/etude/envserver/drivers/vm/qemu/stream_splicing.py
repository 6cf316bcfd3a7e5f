"""Parser of QEMU 7.2's migration stream of a template, checked byte by byte.

The format is QEMU's own and described by its source only (migration/savevm.c, ram.c). A stream that
is not exactly as expected is refused, and the VM is saved as a full stream instead.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from etude.envserver.drivers.vm.dirty_pages import PAGE_BYTES, GuestPages
from etude.envserver.drivers.vm.errors import FormatError

MAGIC = b"QEVM\0\0\0\3"
SECTION_PART, SECTION_FULL, SECTION_FOOTER = 0x02, 0x04, 0x7E
FLAG_EOS, FLAG_PAGE, FLAG_CONTINUE = 0x10, 0x08, 0x20
"""Flags in the first word of each record of section "ram", below the page's offset."""
_CONFIGURATION, _SUBSECTION, _SECTION_START = 0x07, 0x05, 0x01
_FLAG_MEM_SIZE = 0x04
_BOARD = b"microvm"
_CAPABILITIES = b"configuration/capabilities"
_SHARED = b"x-ignore-shared"
_RAM = b"ram"
_RAM_VERSION = 4
_MAX_BLOCKS = 16
_FIRMWARE = frozenset(
    {
        b"/rom@etc/acpi/tables",
        b"pc.bios",
        b"/rom@etc/table-loader",
        b"/rom@etc/acpi/rsdp",
    }
)
_MAIN = b"m0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateStream:
    """A template's device state, and the two offsets at which a delta is spliced in."""

    data: bytes
    section_id: int
    """Number of section "ram"."""
    block: bytes
    """Name of the guest's memory in it."""
    memory_bytes: int
    setup_end: int
    """Offset behind the first part of section "ram", where a delta's pages go."""


def parse(data: bytes) -> TemplateStream:
    """Parse a template's stream.

    Raises:
        FormatError: it is not as QEMU 7.2 writes it for our VM.
    """
    reader = _Reader(data)
    reader.literal(MAGIC, "header")
    _skip_configuration(reader)
    reader.literal(bytes([_SECTION_START]), "first section")
    section_id = reader.number("I", "section number")
    reader.literal(bytes([len(_RAM)]) + _RAM, "name of the first section")
    reader.literal(struct.pack(">II", 0, _RAM_VERSION), "version of the section ram")
    blocks = _blocks(reader)
    reader.literal(struct.pack(">Q", FLAG_EOS), "end of the blocks")
    reader.literal(footer(section_id), "footer of the section ram")
    return TemplateStream(
        data=data,
        section_id=section_id,
        block=_MAIN,
        memory_bytes=blocks[_MAIN],
        setup_end=reader.offset,
    )


def footer(section_id: int) -> bytes:
    """Encode the end of a section's part."""
    return struct.pack(">BI", SECTION_FOOTER, section_id)


def device_sections(template: TemplateStream, device_state: bytes) -> int:
    """Find the offset of the device sections in the template's stream that another state replaces.

    Raises:
        FormatError: the state is not a list of devices, or the offset is ambiguous.
    """
    header = re.match(rb"\x04(....)\x05timer", device_state[len(MAGIC) :], re.DOTALL)
    if not device_state.startswith(MAGIC) or header is None:
        raise FormatError("the device state does not begin with the section timer")
    if not device_state.endswith(b"\0"):
        raise FormatError("the device state has no end")
    start = template.data.find(header.group())
    if start < template.setup_end or template.data.find(header.group(), start + 1) != -1:
        raise FormatError("the section timer is not once in the template's stream")
    return start


def _skip_configuration(reader: "_Reader") -> None:
    reader.literal(bytes([_CONFIGURATION]), "configuration")
    reader.literal(struct.pack(">I", len(_BOARD)) + _BOARD, "name of the board")
    reader.literal(bytes([_SUBSECTION, len(_CAPABILITIES)]) + _CAPABILITIES, "subsection")
    reader.literal(struct.pack(">II", 1, 1), "one capability in version 1")
    reader.literal(bytes([len(_SHARED)]) + _SHARED, "capability")


def _blocks(reader: "_Reader") -> dict[bytes, int]:
    """Parse the sizes of the memory blocks, in bytes, by name.

    Raises:
        FormatError: they are not those of our VM.
    """
    total = reader.number("Q", "memory size")
    if total & 0xFFF != _FLAG_MEM_SIZE:
        raise FormatError("the section ram does not begin with the memory's size")
    left, found = total & ~0xFFF, dict[bytes, int]()
    while left > 0:
        name = reader.take(reader.number("B", "length of a block's name"), "name of a block")
        size = reader.number("Q", "size of a block")
        reader.number("Q", "address of a block")
        if name in found or name not in _FIRMWARE | {_MAIN} or len(found) == _MAX_BLOCKS:
            raise FormatError(f"block {name[:40]!r} is unknown or repeated")
        found[name] = size
        left -= size
    if left != 0 or _MAIN not in found or found[_MAIN] != max(found.values()):
        raise FormatError("the blocks of memory do not add up")
    return found


class _Reader:
    """Reader of big-endian values, with bounds checks."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.offset = 0

    def take(self, size: int, what: str) -> bytes:
        """Read the next bytes.

        Raises:
            FormatError: the data ends before.
        """
        taken = self._data[self.offset : self.offset + size]
        if len(taken) != size:
            raise FormatError(f"the stream ends in the {what}")
        self.offset += size
        return taken

    def literal(self, wanted: bytes, what: str) -> None:
        """Skip expected bytes.

        Raises:
            FormatError: they differ.
        """
        if (found := self.take(len(wanted), what)) != wanted:
            raise FormatError(f"{what} at {self.offset}: {found[:40]!r} instead of {wanted!r}")

    def number(self, kind: str, what: str) -> int:
        """Read an unsigned number: B, I or Q."""
        size = struct.calcsize(f">{kind}")
        value: int
        (value,) = struct.unpack(f">{kind}", self.take(size, what))
        return value


def splice(
    template: TemplateStream, device_state: bytes, pages: GuestPages
) -> Iterator[bytes | memoryview]:
    """Splice a stream that restores a VM on the template's memory.

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


def _section(template: TemplateStream, pages: GuestPages) -> Iterator[bytes | memoryview]:
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
