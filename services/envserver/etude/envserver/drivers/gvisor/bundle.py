"""OCI runtime bundle of a gVisor container. Pure."""

import errno
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.envserver.images.initramfs import AGENT
from etude.envserver.isolation.sandbox_layout import INSIDE_UID, LOGS, WORKSPACE

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
"""Capabilities of our agent, in the user-space kernel only: it starts commands as another user,
sets their limits and ends them. On the machine the sandbox has none; commands never have any."""
_KIND_OF_FILE = 0o170000
"""File type bits of a mode: stat(2)."""
_SMALL_SHARE = 4
"""Divisor of the workspace's size that gives the size of folders for logs and temporary files."""


def spec(root: Path, *, memory_mib: int, has_workspace: bool = False) -> Mapping[str, Any]:
    """Build a bundle's config.json.

    Args:
        root: the image's files, read-only: changes stay in the sandbox's memory, or with a
            workspace of the image on the disk.
        memory_mib: size limit of its workspace. Each of five more folders gets a quarter of it;
            other
            folders of the image have no limit.
        has_workspace: True if the workspace is a folder of the image.
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
            # World-readable there, unlike on Linux.
            "env": [],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": capabilities,
        },
        "mounts": _mounts(memory_mib, has_workspace=has_workspace),
        "linux": {
            "namespaces": [{"type": kind} for kind in kinds],
            "seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": _no_devices()},
        },
    }


def writes_to_disk(config: bytes) -> bool:
    """True if what a container of this config writes belongs on the disk: its workspace does."""
    return not any(each["destination"] == WORKSPACE for each in json.loads(config)["mounts"])


def _no_devices() -> list[Mapping[str, Any]]:
    """Build the inner seccomp filter: gVisor allows all users to make (inert) device nodes."""
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


def _mounts(memory_mib: int, *, has_workspace: bool) -> list[Mapping[str, Any]]:
    small_mib = max(1, memory_mib // _SMALL_SHARE)
    mine = f"mode=0755,uid={INSIDE_UID},gid={INSIDE_UID}"
    # Caches of package managers go to the home of commands, which is /tmp.
    temporary = ("/dev/shm",) if has_workspace else ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        # runsc ignores a size for it; commands cannot write there.
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        *([] if has_workspace else [_memory(WORKSPACE, memory_mib, mine)]),
        _memory(LOGS, small_mib, mine),
        *(_memory(path, small_mib, "mode=1777") for path in temporary),
        _memory("/run", small_mib, "mode=0755"),
    ]


def _memory(path: str, size_mib: int, options: str) -> Mapping[str, Any]:
    return {
        "destination": path,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "nodev", f"size={size_mib}m", *options.split(",")],
    }
