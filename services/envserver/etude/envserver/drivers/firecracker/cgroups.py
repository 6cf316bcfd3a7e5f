"""Control groups that the jailer makes for VMs and does not remove."""

import contextlib
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def remove(name: str, prefix: str, *, root: Path = ROOT) -> None:
    """Remove the control groups of VMs that have ended; the kernel keeps the others.

    Args:
        name: name of their parent group: the VMM's program.
        prefix: prefix of the VM ids.
        root: mount point of control groups.
    """
    with contextlib.suppress(OSError):
        for group in (root / name).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                group.rmdir()
