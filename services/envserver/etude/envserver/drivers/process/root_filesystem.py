"""Root file system of commands: the machine's programs read-only, nothing else of it."""

import os
import shutil
import socket
from pathlib import Path

from etude.envserver.isolation import syscalls
from etude.envserver.isolation.sandbox_layout import (
    INSIDE_UID,
    LEASES,
    LOGS,
    PRIVATE,
    PRIVATE_PROC,
    TESTS,
    TOOLS,
    WORKSPACE,
    SandboxPaths,
)

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc/alternatives")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SHUT = syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_DEVICES
_PROC_FLAGS = syscalls.NO_SUID | syscalls.NO_DEVICES | syscalls.NO_EXEC
PYTEST = """#!/bin/sh
case "$*" in
  ""|-q|-v) exec {python} -B {tools}/lib/minitest.py ;;
esac
echo "pytest: this sandbox has a small test runner: only 'pytest' and 'pytest -q', in the root" >&2
exit 4
"""
"""The pytest command: the policy's tests run on a small runner, wherever they run."""
_ETC = {
    "passwd": f"root:x:0:0:root:/:/bin/sh\nagent:x:{INSIDE_UID}:{INSIDE_UID}::/tmp:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{INSIDE_UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def build_root(layout: SandboxPaths) -> bool:
    """Build the root and move into it, as the first process of new namespaces.

    Returns:
        Whether commands can have a /proc of their own: containers that mask theirs deny it.
    """
    syscalls.mount("none", "/", None, syscalls.RECURSIVE | syscalls.PRIVATE)
    root = Path(layout.new_root)
    syscalls.mount("tmpfs", str(root), "tmpfs", syscalls.NO_SUID, "size=4m,mode=755")
    for name in (WORKSPACE, TESTS, LOGS, LEASES, PRIVATE_PROC, "/dev/shm", "/tmp", "/proc"):  # noqa: S108 - mount points
        (root / name.lstrip("/")).mkdir(parents=True)
    # Home of other systems' clients.
    (root / "home").mkdir()
    (root / "home/user").symlink_to(WORKSPACE)
    _add_system(root, layout)
    _add_devices(root)
    _add_tools(root, layout)
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)
    syscalls.bind(layout.leases, f"{root}{LEASES}", syscalls.NO_SUID | syscalls.NO_DEVICES)
    has_proc = _add_proc(root)
    socket.sethostname("sandbox")
    _enter(root)
    return has_proc


def _add_system(root: Path, layout: SandboxPaths) -> None:
    for name in _SYSTEM:
        source, target = Path("/", name), root / name
        target.parent.mkdir(exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_dir():
            target.mkdir()
            syscalls.bind(str(source), str(target), _SHUT)
    prefix = Path(layout.prefix)
    if not prefix.is_relative_to("/usr"):
        target = root / prefix.relative_to("/")
        target.mkdir(parents=True, exist_ok=True)
        syscalls.bind(str(prefix), str(target), _SHUT)


def _add_devices(root: Path) -> None:
    # Device nodes cannot be made in a user namespace, so the machine's are shown.
    for name in _DEVICES:
        (root / "dev" / name).touch()
        syscalls.bind(f"/dev/{name}", f"{root}/dev/{name}", syscalls.NO_SUID)
    (root / "dev/fd").symlink_to("/proc/self/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (root / "dev" / name).symlink_to(f"/proc/self/fd/{number}")


def _add_tools(root: Path, layout: SandboxPaths) -> None:
    tools = root / TOOLS.lstrip("/")
    (tools / "bin").mkdir(parents=True)
    (tools / "lib").mkdir()
    for name in ("python", "python3"):
        (tools / "bin" / name).symlink_to(layout.python)
    shutil.copyfile(layout.minitest, tools / "lib/minitest.py")
    script = tools / "bin/pytest"
    script.write_text(PYTEST.format(python=layout.python, tools=TOOLS))
    script.chmod(0o755)


def _add_proc(root: Path) -> bool:
    target = f"{root}{PRIVATE_PROC}"
    try:
        syscalls.mount("proc", target, "proc", _PROC_FLAGS)
    except PermissionError:
        syscalls.mount("/proc", target, None, syscalls.BIND | syscalls.RECURSIVE)
        return False
    return True


def _enter(root: Path) -> None:
    shut = syscalls.REMOUNT | syscalls.BIND | _SHUT
    syscalls.mount("none", str(root), None, shut)
    os.chdir(root)
    syscalls.pivot_root(".", ".")
    syscalls.unmount(".")
    os.chdir("/")


def show_proc() -> None:
    """Mount /proc for the process namespace of one command."""
    syscalls.mount("proc", "/proc", "proc", _PROC_FLAGS | syscalls.READ_ONLY)


def hide_private() -> None:
    """Cover the other leases; without capabilities this cannot be undone."""
    syscalls.mount("tmpfs", PRIVATE, "tmpfs", _SHUT, "size=0k,mode=0")
