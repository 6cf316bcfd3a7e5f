"""Streams in QEMU's format as tests make them, and a small reader that restores them."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

MAGIC = b"QEVM\0\0\0\3"
FIRMWARE = {b"/rom@etc/acpi/tables": 0x20000, b"pc.bios": 0x20000, b"/rom@etc/table-loader": 0x1000}
PAGE_BYTES = 4096


def name(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def template_stream(
    *,
    section_id: int = 2,
    memory_bytes: int = 1 << 20,
    blocks: Mapping[bytes, int] = FIRMWARE,
    firmware: Mapping[int, bytes] | None = None,
    devices: bytes = b"",
) -> bytes:
    """What QEMU writes for a template with x-ignore-shared."""
    sizes = {b"m0": memory_bytes, **blocks}
    capability = b"\x05" + name(b"configuration/capabilities")
    capability += struct.pack(">II", 1, 1) + name(b"x-ignore-shared")
    configuration = b"\x07" + struct.pack(">I", 7) + b"microvm" + capability
    setup = struct.pack(">Q", sum(sizes.values()) | 4)
    for block, size in sizes.items():
        setup += name(block) + struct.pack(">QQ", size, 0)
    setup += struct.pack(">Q", 0x10)
    ram = b"\x01" + struct.pack(">I", section_id) + name(b"ram") + struct.pack(">II", 0, 4)
    end = b"\x7e" + struct.pack(">I", section_id)
    pages = b""
    for offset, content in (firmware or {}).items():
        pages += struct.pack(">Q", offset | 8) + name(b"pc.bios") + content
    part = b"\x03" + struct.pack(">I", section_id) + pages + struct.pack(">Q", 0x10) + end
    return MAGIC + configuration + ram + setup + end + part + devices + b"\0"


def devices(**contents: bytes) -> bytes:
    """Device sections: numbers from 7 on, in the order of their names here."""
    found = b""
    for number, (device, content) in enumerate(contents.items(), start=7):
        head = b"\x04" + struct.pack(">I", number) + name(device.encode())
        found += head + struct.pack(">II", 0, 2) + content + b"\x7e" + struct.pack(">I", number)
    return found


def device_state(sections: bytes) -> bytes:
    """What xen-save-devices-state writes."""
    return MAGIC + sections + b"\0"


@dataclass(slots=True)
class Restored:
    """What a stream makes of a machine."""

    memory: dict[int, bytes] = field(default_factory=dict)
    """Pages of the main block, by offset."""
    firmware: dict[int, bytes] = field(default_factory=dict)
    devices: bytes = b""


def restored(stream: bytes) -> Restored:
    """Read a stream as the loader of QEMU's section "ram" does; what follows are the devices."""
    found = Restored()
    at = stream.index(b"\x03ram") + 4 + 8 + 8
    while stream[at : at + 8] != struct.pack(">Q", 0x10):
        at += 1 + stream[at] + 16
    at += 8
    number = stream[at : at + 5]
    at += 5
    while stream[at] in {2, 3}:
        assert stream[at + 1 : at + 5] == number[1:]
        at = _take_part(stream, at + 5, found)
        assert stream[at : at + 5] == number
        at += 5
    found.devices = stream[at:]
    return found


def _take_part(stream: bytes, at: int, found: Restored) -> int:
    block = b""
    while True:
        (word,) = struct.unpack_from(">Q", stream, at)
        at += 8
        if word == 0x10:
            return at
        assert word & 8, "a page"
        if not word & 0x20:
            block = stream[at + 1 : at + 1 + stream[at]]
            at += 1 + stream[at]
        pages = found.memory if block == b"m0" else found.firmware
        pages[word & ~0xFFF] = stream[at : at + PAGE_BYTES]
        at += PAGE_BYTES
