"""A guest's program that prints what its processor calls random: guests have no compiler."""

import base64
import struct

_CODE = bytes.fromhex(
    "480fc7f0"  # rdrand %rax
    "73fa"  # jnc: once more
    "50"  # push %rax
    "480fc7f8"  # rdseed %rax
    "73fa"  # jnc: once more
    "50"  # push %rax
    "b801000000"  # write
    "bf01000000"  # to the standard output
    "4889e6"  # from the stack
    "ba10000000"  # 16 bytes
    "0f05"
    "b83c000000"  # exit
    "31ff"
    "0f05"
)
_AT = 0x400000
_HEADERS_BYTES = 64 + 56


def random_program() -> bytes:
    """A Linux program for x86-64: 8 bytes of RDSEED, then 8 of RDRAND."""
    size = _HEADERS_BYTES + len(_CODE)
    file = struct.pack(
        "<4s5B7x2HI3QI6H",
        *(b"\x7fELF", 2, 1, 1, 0, 0),
        *(2, 62, 1, _AT + _HEADERS_BYTES, 64, 0, 0),
        *(64, 56, 1, 64, 0, 0),
    )
    segment = struct.pack("<2I6Q", 1, 5, 0, _AT, _AT, size, size, 4096)
    return file + segment + _CODE


def random_command() -> str:
    """What a guest's shell runs it by; prints numbers in hexadecimal."""
    program = base64.b64encode(random_program()).decode()
    return (
        f"echo {program} | base64 -d > /tmp/random; chmod +x /tmp/random; "
        "/tmp/random | od -An -tx8 -w16"
    )
