"""Programs of the host that fill a folder from what is not trusted, within limits."""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from etude.common.errors import UserError
from etude.envserver.images.host_programs import build_failure, find_program

_MAX_PATH = 1_024
"""A quarter of what Linux allows: programs and tools add folders in front."""
_LOOK_S = 0.2
_MOST_LOOKS = 5
"""A look at the folder may take a fifth of the time: it may hold a million files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillLimits:
    """Limits on what a program writes into a folder."""

    max_bytes: int = 32 << 30
    """Disk space of all files, and size of one."""
    max_entries: int = 2_000_000
    timeout_s: float = 1_800.0
    stall_s: float = 60.0
    """Time without a change of the folder, after which the program is ended."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end it from another thread."""


class FolderSize(NamedTuple):
    """Size of a folder on the disk."""

    num_bytes: int
    num_entries: int
    longest_path: int
    """Characters, from the folder on."""


def measure_folder(folder: Path, limits: FillLimits) -> FolderSize:
    """Measure a folder that may be changing; counting stops as soon as a limit is exceeded."""
    found = FolderSize(0, 0, 0)
    waiting = [str(folder)]
    while waiting and not exceeded_limit(found, limits):
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    size = 512 * entry.stat(follow_symlinks=False).st_blocks
                    length = len(entry.path) - len(str(folder))
                    found = FolderSize(
                        found.num_bytes + size,
                        found.num_entries + 1,
                        max(found.longest_path, length),
                    )
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:
            continue  # removed meanwhile
    return found


def exceeded_limit(found: FolderSize, limits: FillLimits) -> str:
    """The limit that a folder exceeds, in words; empty if none."""
    if found.num_bytes > limits.max_bytes:
        return f"it takes more than {limits.max_bytes >> 20} MiB on the disk"
    if found.num_entries > limits.max_entries:
        return f"it has more than {limits.max_entries} files and folders"
    if found.longest_path > _MAX_PATH:
        return f"it has a path of more than {_MAX_PATH} characters"
    return ""


def fill_folder(
    words: Sequence[str],
    folder: Path,
    *,
    what: str,
    limits: FillLimits,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run a program that fills a folder, and end it when a limit is exceeded.

    Args:
        words: the program and its arguments; it runs in the folder.
        folder: what it fills.
        what: name of the work in errors.
        limits: on the folder and the time.
        env: its environment; this process's unless given.

    Raises:
        UserError: it failed, or exceeded a limit; the message says which.
    """
    # Also for one file, between two looks.
    bound = (find_program("prlimit"), f"--fsize={limits.max_bytes}", "--core=0")
    command = (*bound, find_program(words[0]), *words[1:])
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            why = _watch(process, folder, limits)
        finally:
            process.kill()
            process.wait()
        if not why and process.returncode:
            why = f"{words[0]} ended with {process.returncode}"
        if why:
            output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
            raise UserError(build_failure(what, why, output.read()))


def _watch(process: "subprocess.Popen[bytes]", folder: Path, limits: FillLimits) -> str:
    """Wait for the end of a program; returns the limit that it exceeded, if any."""
    began_s = grew_s = time.monotonic()
    size, pause_s = FolderSize(0, 0, 0), _LOOK_S
    while True:
        try:
            process.wait(pause_s)
            is_running = False
        except subprocess.TimeoutExpired:
            is_running = True
        look_s = time.monotonic()
        found = measure_folder(folder, limits)
        now_s = time.monotonic()
        if why := exceeded_limit(found, limits):
            return why
        if not is_running:
            return ""
        if limits.stop.is_set():
            return "it was stopped"
        grew_s = now_s if found != size else grew_s
        if now_s - grew_s > limits.stall_s:
            return f"nothing came for {limits.stall_s:.0f} s"
        if now_s - began_s > limits.timeout_s:
            return f"took longer than {limits.timeout_s:.0f} s"
        size, pause_s = found, max(_LOOK_S, _MOST_LOOKS * (now_s - look_s))
