"""Extraction of vmlinux, the ELF kernel that Firecracker loads, from a compressed Linux image.

The layout is Linux's boot protocol (Documentation/arch/x86/boot.rst): the header says where the
payload is, and the payload ends with its size unpacked.
"""

import bz2
import gzip
import lzma
import struct
import zlib
from collections.abc import Callable

from etude.common.errors import CorruptError

ELF = b"\x7fELF"
_HEADER_END = 0x250
_SETUP_SECTS, _MAGIC, _VERSION, _PAYLOAD = 0x1F1, 0x202, 0x206, 0x248
_OLDEST = 0x0208
"""First protocol version with the payload's position."""
_MAX_BYTES = 1 << 28


def vmlinux(image: bytes) -> bytes:
    """Extract the ELF file of a kernel image; an ELF file is returned as it is.

    Raises:
        CorruptError: it is neither, or has an unknown compression.
    """
    if image.startswith(ELF):
        return image
    if len(image) < _HEADER_END or image[_MAGIC : _MAGIC + 4] != b"HdrS":
        raise CorruptError("the kernel is not a Linux image")
    (version,) = struct.unpack_from("<H", image, _VERSION)
    if version < _OLDEST:
        raise CorruptError(f"the kernel's boot protocol {version:#x} is too old")
    offset, size = struct.unpack_from("<II", image, _PAYLOAD)
    start = ((image[_SETUP_SECTS] or 4) + 1) * 512 + offset
    payload = image[start : start + size]
    if len(payload) != size or size < 8:
        raise CorruptError("the kernel image is truncated")
    (unpacked,) = struct.unpack_from("<I", payload, size - 4)
    if unpacked > _MAX_BYTES:
        raise CorruptError(f"the kernel would have {unpacked} bytes")
    found = _unpacked(payload[:-4])
    if len(found) != unpacked or not found.startswith(ELF):
        raise CorruptError("the kernel image does not hold an ELF file of the stated size")
    return found


def _unpacked(payload: bytes) -> bytes:
    ways: dict[bytes, Callable[[bytes], bytes]] = {
        b"\x02\x21\x4c\x18": _lz4,
        b"\x1f\x8b": gzip.decompress,
        b"\xfd7zXZ\x00": lzma.decompress,
        b"BZh": bz2.decompress,
    }
    for magic, way in ways.items():
        if payload.startswith(magic):
            try:
                return way(payload)
            except (OSError, EOFError, lzma.LZMAError, zlib.error, IndexError) as cause:
                raise CorruptError(f"the kernel cannot be unpacked: {cause}") from cause
    raise CorruptError(f"the kernel has an unknown compression, {payload[:4].hex()}")


def _lz4(payload: bytes) -> bytes:
    """Decompress legacy LZ4 frames: each a size and a block, to the end."""
    found, at = bytearray(), 4
    while at + 4 <= len(payload):
        (size,) = struct.unpack_from("<I", payload, at)
        at += 4
        found += _lz4_block(payload[at : at + size])
        at += size
    return bytes(found)


def _lz4_block(block: bytes) -> bytes:
    """Decompress an LZ4 block: literals, and matches of earlier output.

    Raises:
        IndexError: it ends too early, or a match is out of range.
    """
    found, at = bytearray(), 0
    while at < len(block):
        token, at = block[at], at + 1
        length, at = _extended(block, at, token >> 4)
        found += block[at : at + length]
        at += length
        if at >= len(block):
            break  # the last sequence has no match
        distance, at = block[at] | block[at + 1] << 8, at + 2
        length, at = _extended(block, at, token & 15)
        length += 4
        if not 0 < distance <= len(found) or len(found) + length > _MAX_BYTES:
            raise IndexError("a match is out of range")
        start = len(found) - distance
        piece = found[start : start + length]
        found += piece if distance >= length else (piece * (length // distance + 1))[:length]
    return bytes(found)


def _extended(block: bytes, at: int, length: int) -> tuple[int, int]:
    """Read a length, extended by more bytes if its four bits are set, and the offset behind it."""
    if length == 15:
        while True:
            more, at = block[at], at + 1
            length += more
            if more != 255:
                break
    return length, at
