"""Memory of a process and everything it started, from /proc."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(slots=True)
class PeakMemory:
    """Largest proportional set size of a process tree over all looks.

    Proportional: a page that n processes share counts 1/n in each, so the sum is what the tree
    really holds.
    """

    pid: int
    peak_bytes: int = 0

    def look(self) -> None:
        """Measure once."""
        self.peak_bytes = max(self.peak_bytes, sum(_pss(pid) for pid in tree(self.pid)))


def tree(root: int) -> list[int]:
    """The process and all its living descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children[parent].append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children[pid]
    return found


def _parent(entry: Path) -> int | None:
    try:
        # The command name stands in brackets and may hold blanks: the fields follow the last one.
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _pss(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
