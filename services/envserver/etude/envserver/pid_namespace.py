"""A PID namespace around a process tree: everything in it dies with its first process.

The first process dies with the one that made the namespace, so the kernel ends everything in it
however that one ends, SIGKILL included. Covered: processes that left their session, changed their
user, or lost their parent. Not covered: hosts where neither root nor user namespaces are allowed.
"""

import os
import select
import signal
from collections.abc import Callable

from etude.envserver.isolation import syscalls

ENDING = (signal.SIGTERM, signal.SIGINT)
_PROC_FLAGS = syscalls.NO_SUID | syscalls.NO_DEVICES | syscalls.NO_EXEC


def is_possible() -> bool:
    """True if this host allows it, as a child process that tries it finds."""
    trial = os.fork()
    if trial == 0:
        os._exit(_try_namespace())
    return os.waitpid(trial, 0)[1] == 0


def run_in_namespace(work: Callable[[], int]) -> int:
    """Run the work as the first process of a namespace, and forward signals; returns its exit code.

    The work has to set its handlers of those signals, and unblock them.

    Raises:
        OSError: this host does not allow it.
    """
    maker = os.pidfd_open(os.getpid())
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    _unshare_for_children()
    first = os.fork()
    if first == 0:
        _become_first_process(maker)
        os._exit(work() & 0xFF)
    os.close(maker)
    for number in ENDING:
        signal.signal(number, lambda number, _: os.kill(first, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    return code if code >= 0 else 128 - code


def _unshare_for_children() -> None:
    """Make the next child the first process of a new namespace."""
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.NEW_PIDS | (syscalls.NEW_USER if uid else 0), "a PID namespace")
    if uid:
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
            os.write(descriptor, text.encode())
            os.close(descriptor)


def _become_first_process(maker: int) -> None:
    """Become the first process: tied to the maker, with a /proc of its own.

    Raises:
        OSError: the mount is not allowed.
    """
    syscalls.die_with_parent()
    if select.select([maker], [], [], 0)[0]:
        os._exit(137)  # it ended before we asked to be told
    os.close(maker)
    syscalls.unshare(syscalls.NEW_MOUNTS, "a mount namespace")
    syscalls.mount("none", "/", None, syscalls.RECURSIVE | syscalls.PRIVATE)
    syscalls.mount("proc", "/proc", "proc", _PROC_FLAGS)


def _try_namespace() -> int:
    try:
        maker = os.pidfd_open(os.getpid())
        _unshare_for_children()
        first = os.fork()
        if first == 0:
            os._exit(_try_first_process(maker))
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    except OSError:
        return 1


def _try_first_process(maker: int) -> int:
    try:
        _become_first_process(maker)
    except OSError:
        return 1
    return 0
