"""The control groups that the jailer makes for machines, and that nobody but us removes."""

import contextlib
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def remove(name: str, prefix: str, *, root: Path = ROOT) -> None:
    """Remove those of machines that have ended; the kernel keeps the others.

    Args:
        name: of the group they are in, which is that of the monitor's program.
        prefix: of the machines' ids.
        root: where control groups are mounted.
    """
    with contextlib.suppress(OSError):
        for group in (root / name).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                group.rmdir()
