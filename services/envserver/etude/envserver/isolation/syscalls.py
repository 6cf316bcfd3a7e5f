"""Linux system calls that Python 3.11 does not offer."""

import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct

NEW_MOUNTS = 0x0002_0000
NEW_HOSTNAME = 0x0400_0000
NEW_IPC = 0x0800_0000
NEW_USER = 0x1000_0000
NEW_PIDS = 0x2000_0000
NEW_NETWORK = 0x4000_0000

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 0x1, 0x2, 0x4, 0x8
"""Mount flags; mount_setattr(2) uses the same first four bits."""
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x4_0000
REMOUNT = 0x20
DETACH = 2

_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_PIVOT_ROOT, _SYS_CAPSET, _SYS_MOUNT_SETATTR = 155, 126, 442
_CAPABILITY_VERSION_3 = 0x2008_0522
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

# PyDLL keeps the interpreter lock: these calls are short, and there is one thread.
_libc = ctypes.PyDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def require_machine() -> None:
    """Refuse machines whose system call numbers are not known here.

    Raises:
        OSError: this is not Linux on x86-64.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, "the process driver needs Linux on x86-64", platform.machine())


def unshare(flags: int, what: str) -> None:
    """Leave the namespaces named by flags for new ones."""
    _checked(_libc.unshare(flags), what)


def enter_namespace(descriptor: int, flags: int) -> None:
    """Join the namespace behind an open /proc/PID/ns file."""
    _checked(_libc.setns(descriptor, flags), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Add a mount, or change one."""
    packed = (source.encode(), target.encode(), kind.encode() if kind else None)
    data = options.encode() if options else None
    _checked(_libc.mount(*packed, ctypes.c_ulong(flags), data), f"mount {target}")


def bind(source: str, target: str, attributes: int) -> None:
    """Show source at target too, everything below it included, with these mount attributes."""
    mount(source, target, None, BIND | RECURSIVE)
    restrict(target, attributes)


def restrict(target: str, attributes: int) -> None:
    """Add attributes to a mount and all below it (Linux 5.12)."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    arguments = (_AT_FDCWD, target.encode(), _AT_RECURSIVE, wanted, len(wanted))
    _checked(_libc.syscall(_SYS_MOUNT_SETATTR, *arguments), f"mount_setattr {target}")


def unmount(target: str) -> None:
    """Remove a mount now, from processes that use it later."""
    _checked(_libc.umount2(target.encode(), DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make new the root of this mount namespace; the old one appears at old."""
    _checked(_libc.syscall(_SYS_PIVOT_ROOT, new.encode(), old.encode()), "pivot_root")


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def set_dumpable(*, to: bool) -> None:
    """Allow or deny processes of the same user to inspect this one, also through /proc."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, int(to), 0, 0, 0), "PR_SET_DUMPABLE")


def drop_capabilities() -> None:
    """Give up every capability, and every way to get one by running a file."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.syscall(_SYS_CAPSET, header, bytes(24)), "capset")


def install_filter(program: bytes) -> None:
    """Put a seccomp program, 8 bytes an instruction, on this process and all its children."""
    code = ctypes.create_string_buffer(program)
    header = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code))
    _checked(
        _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0),
        "PR_SET_SECCOMP",
    )


def listener(port: int, backlog: int) -> socket.socket:
    """Listen on the localhost of this network namespace; the socket may be sent elsewhere."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.bind(("127.0.0.1", port))
        made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made


def loopback_up() -> None:
    """Bring up the localhost of this network namespace, and nothing else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
