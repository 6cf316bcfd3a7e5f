"""Memory and CPU time of process trees, from /proc."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from etude.common.run_folder.state import read_state

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
FILE = "resources.jsonl"


class ProcessUsage(NamedTuple):
    """Memory and CPU time of a process tree."""

    pss_bytes: int
    """Proportional set size: a page shared by n processes counts 1/n in each of them."""
    cpu_s: float
    """CPU seconds of living processes and of their children that were waited for."""


@dataclass(slots=True)
class ResourceLog:
    """Measures a local run's processes and appends the usage of each role to resources.jsonl."""

    folder: Path
    runtime_pid: int

    def measure(self) -> None:
        """Measure once."""
        children = _children()
        # The roles' processes are in the runtime's tree: each is read once.
        usage = {pid: _usage(pid) for pid in _descendants(self.runtime_pid, children)}
        total = _sum(usage.values())
        state = read_state(self.folder)
        pids: dict[str, list[int]] = defaultdict(list)
        for pod in state.pods if state else ():
            if pod.pid is not None:
                pids[pod.role] += _descendants(pod.pid, children)
        roles = {
            role: _sum(usage[pid] for pid in group if pid in usage) for role, group in pids.items()
        }
        row = {
            "time_s": round(time.time(), 2),
            "total": total._asdict(),
            "roles": {role: used._asdict() for role, used in roles.items()},
        }
        with (self.folder / FILE).open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_measurements(folder: Path) -> list[dict[str, Any]]:
    """Every measurement of a run, oldest first; a torn last line is left out."""
    path = folder / FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def process_tree(root: int) -> list[int]:
    """The process and all its living descendants."""
    return _descendants(root, _children())


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children[int(fields[1])].append(int(entry.name))
    return children


def _descendants(root: int, children: dict[int, list[int]]) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def _usage(pid: int) -> ProcessUsage:
    return ProcessUsage(_pss(pid), _cpu_s(pid))


def _sum(usage: Iterable[ProcessUsage]) -> ProcessUsage:
    used = list(usage)
    return ProcessUsage(sum(u.pss_bytes for u in used), round(sum(u.cpu_s for u in used), 2))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command name; empty once the process is gone."""
    try:
        # The command name stands in brackets and may hold blanks: the fields follow the last one.
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_SECOND


def _pss(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
