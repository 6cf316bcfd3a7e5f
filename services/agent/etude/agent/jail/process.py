r"""Jail process: runs a linter on its input, without any other effect.

    python -I -S jail.py PROGRAM ARGUMENT…

A request is `{bytes of a name} {bytes of content}\n`, the name, the content; the linter is started
with the arguments and the name, and reads the content. The answer is `{bytes}\n` and its output, or
`-1\n` if it broke a limit. Standard library only: this file is started by its path.

Covered: the linter has an unused user id if we are root, opens no file but the system's libraries
and itself, writes none, has no network and gains no privileges, and is bounded in time, memory and
output. Not covered: kernels before 5.13 have no Landlock, and a process that is not root may be
refused namespaces; the other boundaries hold independently.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import BinaryIO, NoReturn

MAX_OUTPUT_BYTES = 16 << 20
TIMEOUT_S = 10.0
"""ruff takes 11 ms for 120 KB; the rest is for a machine that is busy a hundredfold."""
_MEMORY_BYTES = 2 << 30
_UID = 65_531
"""User id of its own: neither sandboxes nor VMs use it."""
_NAMESPACES = 0x4000_0000 | 0x0800_0000 | 0x0400_0000
"""Network, IPC and host name."""
_NEW_USER = 0x1000_0000
_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_DIR = 1, 4, 8
_FILE_RIGHTS = ((1, 13), (2, 14), (3, 15), (5, 16))
"""Number of file rights by the first version of Landlock that has them."""
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")
_LIMITS = (
    (resource.RLIMIT_AS, _MEMORY_BYTES),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_NOFILE, 64),
)

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve standard input until it ends."""
    program = os.open(sys.argv[1], os.O_RDONLY | os.O_CLOEXEC)
    confine(program)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.readline():
        name_bytes, size = map(int, header.split())
        name, data = os.fsdecode(requests.read(name_bytes)), requests.read(size)
        output = _run(program, [*sys.argv[1:], f"--stdin-filename={name}", "-"], data)
        _answer(answers, output)


def _answer(answers: BinaryIO, output: bytes | None) -> None:
    answers.write(b"-1\n" if output is None else b"%d\n%s" % (len(output), output))
    answers.flush()


def confine(program: int) -> None:
    """Drop everything that a linter does not need."""
    for limit, value in _LIMITS:
        resource.setrlimit(limit, (value, value))
    is_root = os.geteuid() == 0
    _libc.unshare(ctypes.c_int(_NAMESPACES if is_root else _NAMESPACES | _NEW_USER))
    if is_root:
        with contextlib.suppress(OSError):  # root of a namespace that has not as many users
            os.setgroups([])
            os.setresgid(_UID, _UID, _UID)
            os.setresuid(_UID, _UID, _UID)
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _close_files(program)


def _close_files(program: int) -> None:
    """Restrict this process to opening the files that start the program.

    Raises:
        OSError: the kernel has Landlock, and refuses it.
    """
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if version < 1:
        return
    rights = max(count for since, count in _FILE_RIGHTS if since <= version)
    # Files; from version 4 on also ports, and from 6 on sockets and signals of other processes.
    size = 8 if version < 4 else 16 if version < 6 else 24
    handled = struct.pack("=QQQ", (1 << rights) - 1, 3, 3)[:size]
    rules = _libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(size), 0)
    for path in _SYSTEM:
        with contextlib.suppress(FileNotFoundError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            is_folder = os.path.isdir(path)  # noqa: PTH112 - pathlib would be half of the start
            _allow(rules, place, _EXECUTE | _READ_FILE | (_READ_DIR if is_folder else 0))
            os.close(place)
    _allow(rules, program, _EXECUTE | _READ_FILE)
    if _libc.syscall(_RESTRICT_SELF, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, place: int, access: int) -> None:
    rule = struct.pack("=Qi", access, place)
    if _libc.syscall(_ADD_RULE, rules, _BENEATH, rule, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_add_rule")


def _run(program: int, arguments: list[str], data: bytes) -> bytes | None:
    """The linter's output; None if it broke a limit."""
    (stdin, feed), (reader, stdout) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _become(program, arguments, (stdin, stdout))
    os.close(stdin)
    os.close(stdout)
    try:
        return _exchange(feed, reader, data)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _become(program: int, arguments: list[str], streams: tuple[int, int]) -> NoReturn:
    try:
        for target, source in enumerate(streams):
            os.dup2(source, target)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve(program, arguments, {"RAYON_NUM_THREADS": "1"})  # noqa: S606 - the purpose
    finally:
        os._exit(127)


def _exchange(feed: int, reader: int, data: bytes) -> bytes | None:
    """Write the linter's input and read its output until it ends."""
    output, view = bytearray(), memoryview(data)
    over_s = time.monotonic() + TIMEOUT_S
    os.set_blocking(feed, False)
    poller = select.poll()
    poller.register(feed, select.POLLOUT)
    poller.register(reader, select.POLLIN)
    is_fed = False
    while (left_s := over_s - time.monotonic()) > 0 and len(output) <= MAX_OUTPUT_BYTES:
        events = dict(poller.poll(1000 * left_s))
        if feed in events and not is_fed:
            view = view[_write_some(feed, view) :]
            if not view or events[feed] & select.POLLERR:
                poller.unregister(feed)
                os.close(feed)
                is_fed = True
        if reader in events:
            piece = os.read(reader, 1 << 16)
            if not piece:
                break
            output += piece
    if not is_fed:
        os.close(feed)
    return bytes(output) if left_s > 0 and len(output) <= MAX_OUTPUT_BYTES else None


def _write_some(feed: int, view: memoryview) -> int:
    try:
        return os.write(feed, view)
    except (BlockingIOError, BrokenPipeError):
        return 0


if __name__ == "__main__":
    main()
