"""Seccomp filter of commands, as a classic BPF program.

Denied with EPERM: new namespaces, mounts, tracing, other processes' memory, BPF, key rings,
performance counters, io_uring, userfaultfd, kernel images and modules, the clock, and sockets of
families that a network namespace does not contain (vsock reaches the hypervisor).
"""

import errno
import struct

MOUNTING = (165, 166, 155, 161, 428, 429, 430, 431, 432, 433, 442)
TRACING = (101, 310, 311, 312, 438, 440)
NAMESPACES = (272, 308)
KERNEL = (169, 175, 176, 246, 313, 320, 163, 167, 168, 153, 172, 173, 179, 443, 103)
CLOCK = (159, 164, 227, 305)
SIDE_DOORS = (248, 249, 250, 298, 304, 321, 323, 425, 426, 427)
CLONE, SOCKET, CLONE3 = 56, 41, 435

NAMESPACE_FLAGS = 0x7E02_0080
FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6, and netlink, which name lookups ask for the local addresses."""

_X86_64 = 0xC000_003E
_X32_BIT = 0x4000_0000
_ALLOW, _ERRNO, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def program() -> bytes:
    """The filter: 8 bytes an instruction."""
    eperm, enosys = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    denied = sorted({*MOUNTING, *TRACING, *NAMESPACES, *KERNEL, *CLOCK, *SIDE_DOORS})
    steps = [
        _step(_LOAD, _MACHINE),
        _step(_EQUAL, _X86_64, 1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, _X32_BIT, 0, 1),
        _step(_RETURN, _KILL),
    ]
    for number in denied:
        steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, eperm)]
    # clone3 hides its flags behind a pointer; libc falls back to clone on ENOSYS.
    steps += [_step(_EQUAL, CLONE3, 0, 1), _step(_RETURN, enosys)]
    steps += [
        _step(_EQUAL, CLONE, 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, NAMESPACE_FLAGS, 0, 1),
        _step(_RETURN, eperm),
        _step(_RETURN, _ALLOW),
        _step(_EQUAL, SOCKET, 0, len(FAMILIES) + 2),
        _step(_LOAD, _FIRST_ARGUMENT),
    ]
    for index, family in enumerate(FAMILIES):
        steps.append(_step(_EQUAL, family, len(FAMILIES) - index))
    steps += [_step(_RETURN, eperm), _step(_RETURN, _ALLOW)]
    return b"".join(steps)
