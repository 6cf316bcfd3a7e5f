"""What a container of gVisor is made of, in the words of the OCI runtime specification. Pure."""

import errno
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.envserver.drivers.sandbox.layout import INSIDE_UID, LOGS, WORKSPACE
from etude.envserver.images.initramfs import AGENT

OCI_VERSION = "1.0.2"
STATE = "/run/guestagent"
_CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SYS_RESOURCE",
)
"""Of our agent, in the kernel in user space only: it makes commands another user, sets their limits
and ends them. On the host the sandbox has none, and commands have none anywhere."""
_KIND_OF_FILE = 0o170000
"""Of a mode: stat(2)."""
_SMALL_SHARE = 4
"""Folders for logs and temporary files get this part of what the workspace gets."""


def spec(root: Path, *, memory_mib: int) -> Mapping[str, Any]:
    """A bundle's config.json.

    Args:
        root: the image's files, which nobody writes to: changes stay in the sandbox's memory.
        memory_mib: how much its workspace may take. Each of five more folders may take a quarter of
            it; what the image lets commands write elsewhere has no limit.
    """
    capabilities = dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES)
    kinds = ("pid", "network", "ipc", "uts", "mount")
    return {
        "ociVersion": OCI_VERSION,
        "hostname": "environment",
        "root": {"path": str(root), "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [AGENT, "--stdio", "--uid", str(INSIDE_UID), "--state", STATE],
            # Everybody may read it there, unlike on Linux.
            "env": [],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": capabilities,
        },
        "mounts": _mounts(memory_mib),
        "linux": {
            "namespaces": [{"type": kind} for kind in kinds],
            "seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": _no_devices()},
        },
    }


def _no_devices() -> list[Mapping[str, Any]]:
    """A filter inside: that kernel lets everybody make device nodes, which open nothing."""
    return [
        {
            "names": [name],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": errno.EPERM,
            "args": [
                {
                    "index": place,
                    "value": _KIND_OF_FILE,
                    "valueTwo": kind,
                    "op": "SCMP_CMP_MASKED_EQ",
                }
            ],
        }
        for name, place in (("mknod", 1), ("mknodat", 2))
        for kind in (stat.S_IFCHR, stat.S_IFBLK)
    ]


def _mounts(memory_mib: int) -> list[Mapping[str, Any]]:
    small_mib = max(1, memory_mib // _SMALL_SHARE)
    mine = f"mode=0755,uid={INSIDE_UID},gid={INSIDE_UID}"
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        # runsc passes no size on for it; commands may not write there.
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        _memory(WORKSPACE, memory_mib, mine),
        _memory(LOGS, small_mib, mine),
        *(_memory(path, small_mib, "mode=1777") for path in ("/tmp", "/var/tmp", "/dev/shm")),  # noqa: S108
        _memory("/run", small_mib, "mode=0755"),
    ]


def _memory(path: str, size_mib: int, options: str) -> Mapping[str, Any]:
    return {
        "destination": path,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "nodev", f"size={size_mib}m", *options.split(",")],
    }
