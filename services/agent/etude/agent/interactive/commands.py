"""Runner of shell commands in a user's folder, with the results that training's sandboxes give.

Covered: time, output and lifetime of a command are limited as there, and its output is cut to the
same bytes. Not covered: it has the user's own rights, network and programs, and its processes may
leave its process group; the user is asked before.
"""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from etude.agent.workspace import ExecResult

EDGE_BYTES = 64 << 10
"""Bytes of a long output that are kept at its beginning, and at its end."""
FLOOD_BYTES = 256 << 20
TERM_GRACE_S = 2.0
_POLL_S = 0.05
ENVIRONMENT: Mapping[str, str] = {
    "CI": "1",
    "LANG": "C.UTF-8",
    "PAGER": "cat",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "TERM": "dumb",
}
"""Variables that change what programs print, as sandboxes set them."""
HIDDEN = frozenset({"ETUDE_API_KEY"})
"""Variables that commands do not get: the gateway is sent what they print, and may record it."""


class _Edges(NamedTuple):
    output: bytes
    dropped_bytes: int
    dropped_lines: int


@dataclass(frozen=True, slots=True)
class CommandRunner:
    """Runs commands in one folder."""

    folder: Path
    environment: Mapping[str, str]
    """Of the user."""

    async def run(self, command: str, timeout_s: float) -> ExecResult:
        """Run one command to its end; nothing of its process group outlives it."""
        with tempfile.TemporaryFile() as output:
            shared = {k: v for k, v in self.environment.items() if k not in HIDDEN}
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", command),
                cwd=self.folder,
                env={**shared, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ended_for = await _wait(process, output, timeout_s)
            finally:
                await _end(process)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            kept = _read_edges(output)
            code = process.returncode or 0
            used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return ExecResult(
                output=kept.output,
                exit_code=code if code >= 0 else 128 - code,
                timed_out=ended_for == "time",
                ended_for=ended_for,
                cpu_ms=round(1000 * used_s),
                dropped_bytes=kept.dropped_bytes,
                dropped_lines=kept.dropped_lines,
            )


async def _wait(process: asyncio.subprocess.Process, output: IO[bytes], timeout_s: float) -> str:
    """Wait for the end; returns the limit that is reached before it, if any."""
    deadline_s = time.monotonic() + timeout_s
    waiting = asyncio.create_task(process.wait(), name="command")
    try:
        while not waiting.done():
            if time.monotonic() > deadline_s:
                return "time"
            if os.fstat(output.fileno()).st_size > FLOOD_BYTES:
                return "output"
            await asyncio.wait({waiting}, timeout=_POLL_S)
        return ""
    finally:
        waiting.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End all processes of the command's group."""
    if process.returncode is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TERM_GRACE_S):
                await process.wait()
    _signal(process.pid, signal.SIGKILL)
    await process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _read_edges(output: IO[bytes]) -> _Edges:
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= 2 * EDGE_BYTES:
        return _Edges(output.read(), 0, 0)
    head = output.read(EDGE_BYTES)
    left = dropped = size - 2 * EDGE_BYTES
    lines = 0
    while left > 0 and (part := output.read(min(left, 1 << 20))):
        lines += part.count(b"\n")
        left -= len(part)
    return _Edges(head + output.read(EDGE_BYTES), dropped, lines)
