"""What QEMU 7.2 writes for a template: where its sections are, checked byte by byte.

The format is QEMU's own and has no description but its source (migration/savevm.c, ram.c). Whatever
is not exactly as expected is refused, and the machine is saved as a full stream instead.
"""

import re
import struct
from dataclasses import dataclass

from etude.envserver.drivers.machines.errors import FormatError

MAGIC = b"QEVM\0\0\0\3"
SECTION_PART, SECTION_FULL, SECTION_FOOTER = 0x02, 0x04, 0x7E
FLAG_EOS, FLAG_PAGE, FLAG_CONTINUE = 0x10, 0x08, 0x20
"""Below the page's offset in the first word of each record of the section "ram"."""
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
    """A template's device state, and the two places where a delta goes into it."""

    data: bytes
    section_id: int
    """Number of the section "ram"."""
    block: bytes
    """Name of the guest's memory in it."""
    memory_bytes: int
    setup_end: int
    """Offset behind the first part of the section "ram": a delta's pages go there."""


def parse(data: bytes) -> TemplateStream:
    """Take a template's stream apart.

    Raises:
        FormatError: anything in it is not as QEMU 7.2 writes it for our machine.
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
    """What ends each part of a section."""
    return struct.pack(">BI", SECTION_FOOTER, section_id)


def device_sections(template: TemplateStream, device_state: bytes) -> int:
    """Where in the template's stream the device sections begin that another state replaces.

    Raises:
        FormatError: the state is no list of devices, or the place is not certain.
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
    """Sizes of the blocks of memory, in bytes, by name.

    Raises:
        FormatError: they are others than our machine has.
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
    """Big-endian values one after another, never beyond the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.offset = 0

    def take(self, size: int, what: str) -> bytes:
        """The next bytes.

        Raises:
            FormatError: there are not so many.
        """
        taken = self._data[self.offset : self.offset + size]
        if len(taken) != size:
            raise FormatError(f"the stream ends in the {what}")
        self.offset += size
        return taken

    def literal(self, wanted: bytes, what: str) -> None:
        """Pass over bytes that are known.

        Raises:
            FormatError: they are others.
        """
        if (found := self.take(len(wanted), what)) != wanted:
            raise FormatError(f"{what} at {self.offset}: {found[:40]!r} instead of {wanted!r}")

    def number(self, kind: str, what: str) -> int:
        """The next unsigned number: B, I or Q."""
        size = struct.calcsize(f">{kind}")
        value: int
        (value,) = struct.unpack(f">{kind}", self.take(size, what))
        return value
