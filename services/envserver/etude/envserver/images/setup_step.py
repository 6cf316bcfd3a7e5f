"""Runs one setup command as root of a layered root file system, away from the host.

Covered: the command sees no file and no process of the host and, unless asked for, no network;
it cannot mount, make device nodes, load modules, trace, or change kernel settings. Not covered: it
is root of the host's user namespace, and no system call filter is between it and the kernel, so a
spec is to be built by those who trust its author. It runs as a process of its own, because
namespaces cannot be left again.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from etude.envserver.isolation import syscalls

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 31})
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, setfcap: what packages need."""
_LAST_CAPABILITY = 40
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 1, 24
_NAMESPACES = syscalls.NEW_MOUNTS | syscalls.NEW_HOSTNAME | syscalls.NEW_IPC | syscalls.NEW_PIDS

_libc = ctypes.PyDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFile:
    """A file that is put into the root before the command runs."""

    source: str
    """A file of the host."""
    path: str
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupJob:
    """One command; folders are relative to the folder that the process starts in."""

    layers: tuple[str, ...]
    """Folders that make up the root, the topmost first."""
    upper: str
    """An empty folder that takes what changes; empty text: nothing changes."""
    work: str
    """An empty folder on the same file system, for the kernel."""
    merged: str
    """An empty folder where the root is put together."""
    files: tuple[PlacedFile, ...] = ()
    script: str = ""
    """Run by `/bin/sh -e` in the root; with an empty text nothing is run there."""
    outside: tuple[str, ...] = ()
    """A program of the host that is run instead, with the root at `merged`."""
    network: bool = False

    @classmethod
    def decoded(cls, text: str) -> "SetupJob":
        """The job in the text of `json.dumps(dataclasses.asdict(job))`."""
        fields = json.loads(text)
        fields["files"] = tuple(PlacedFile(**each) for each in fields["files"])
        return cls(**fields | {name: tuple(fields[name]) for name in ("layers", "outside")})


def main() -> None:
    """Do the job given as the only argument.

    Raises:
        SystemExit: with the exit code of the command.
    """
    _die_with_parent()
    job = SetupJob.decoded(sys.argv[1])
    syscalls.unshare(_NAMESPACES | (0 if job.network else syscalls.NEW_NETWORK), "namespaces")
    syscalls.mount("none", "/", None, syscalls.RECURSIVE | syscalls.PRIVATE)
    syscalls.mount("overlay", job.merged, "overlay", 0, _overlay(job))
    child = os.fork()
    if child == 0:
        _die_with_parent()
        _inside(job)
    _, status = os.waitpid(child, 0)
    raise SystemExit(os.waitstatus_to_exitcode(status) & 0xFF)


def _overlay(job: SetupJob) -> str:
    lower = f"lowerdir={':'.join(job.layers)}"
    return f"{lower},upperdir={job.upper},workdir={job.work}" if job.upper else lower


def _die_with_parent() -> None:
    # A killed builder must not leave its command running on an entry that another one rebuilds.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _inside(job: SetupJob) -> None:
    if job.outside:
        _become(job.outside)
    contents = [(file, Path(file.source).read_bytes()) for file in job.files]
    names = Path("/etc/resolv.conf").read_bytes() if job.network else None
    _enter(job.merged)
    for file, content in contents:
        _place(file, content)
    if not job.script:
        raise SystemExit(0)
    if names is not None:
        # Seen by the command only: what is mounted does not become part of the layer.
        syscalls.mount("tmpfs", "/run", "tmpfs", syscalls.NO_SUID, "mode=755")
        _show_names(names)
    _drop_capabilities()
    _become(("/bin/sh", "-e", "-c", job.script))


def _become(command: tuple[str, ...]) -> NoReturn:
    os.execve(command[0], command, dict(ENVIRONMENT))  # noqa: S606 - there is no shell to avoid


def _enter(root: str) -> None:
    os.chdir(root)
    Path("proc").mkdir(exist_ok=True)
    # Read-only: the root user may otherwise change the host's kernel settings below /proc/sys.
    flags = syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_DEVICES | syscalls.NO_EXEC
    syscalls.mount("proc", "proc", "proc", flags)
    syscalls.pivot_root(".", ".")
    syscalls.unmount(".")
    os.chdir("/")


def _place(file: PlacedFile, content: bytes) -> None:
    path = Path(file.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(file.mode)


def _show_names(names: bytes) -> None:
    shown = Path("/etc/resolv.conf")
    if not shown.exists():
        shown.unlink(missing_ok=True)
        shown.touch()
    Path("/run/resolv.conf").write_bytes(names)
    syscalls.mount("/run/resolv.conf", "/etc/resolv.conf", None, syscalls.BIND)


def _drop_capabilities() -> None:
    for number in range(_LAST_CAPABILITY + 1):
        if number not in _KEPT_CAPABILITIES:
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)


if __name__ == "__main__":
    main()
