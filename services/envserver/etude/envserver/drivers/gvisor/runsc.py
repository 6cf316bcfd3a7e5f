"""Client of gVisor's program runsc: its version and its commands."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from etude.envserver.drivers.base import SandboxError

PROGRAM = "runsc"
OLDEST = 20240101
"""Releases before it refuse statx with AT_NO_AUTOMOUNT: ls and stat of GNU coreutils 9 fail."""
LIMIT_S = 120.0
"""A command takes 0.1 s, and 0.5 to 2 s where gigabytes are saved or the host is busy."""
FIX = "install gVisor of 2024 or newer on the node (make system-deps), or set another driver"
_DATE = re.compile(r"^runsc version \D*(?:\d\.\d~)?(\d{8})", re.MULTILINE)
_MAX_TOLD = 2_000
_T = TypeVar("_T")


class RunscError(SandboxError):
    """runsc failed."""


def version_problem(said: str) -> str:
    """Explain why a program with this version text is refused; empty if it is not. Pure."""
    found = _DATE.search(said)
    if found is None:
        return f"its version {said[:100]!r} has no date"
    if int(found[1]) < OLDEST:
        return (
            f"its release of {found[1]} refuses calls that ls and stat of GNU coreutils 9 make;"
            f" {OLDEST} or newer is needed (make system-deps)"
        )
    return ""


async def version() -> str:
    """Read the version of the installed program.

    Raises:
        RunscError: there is none, it is too old, or this process may not use it.
    """
    if os.geteuid() != 0:
        raise RunscError("gVisor needs root")
    if shutil.which(PROGRAM) is None:
        raise RunscError(f"{PROGRAM} is not installed")
    said = await _output((PROGRAM, "--version"))
    if why := version_problem(said):
        raise RunscError(f"{PROGRAM} is not used: {why}")
    return said.partition("\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunscClient:
    """Commands for the containers of one state folder."""

    state: Path
    live: set[str] = field(default_factory=set)
    """Containers that this process starts or has, which no sweep may end."""
    _flags: tuple[str, ...] = field(
        default=(
            "--platform=systrap",
            "--network=none",
            # The user-space kernel opens no file of the machine itself: it asks a second process.
            "--directfs=false",
            "--host-uds=none",
            "--host-fifo=none",
            "--oci-seccomp",
            # A host in a Pod cannot manage them.
            "--ignore-cgroups",
        )
    )

    async def start(
        self, words: Sequence[str], *, ends: tuple[int, int], log: Path, disk: Path | None = None
    ) -> None:
        """Run or restore a container, which outlives the command and this process.

        Args:
            words: the command and its options.
            ends: its standard input and output.
            log: file of its messages.
            disk: folder that holds what is written over the image, which is read-only; without it
                memory does. Checkpoints have it in both cases.

        Raises:
            RunscError: it failed; the message has the last words.
        """
        overlay = "root:memory" if disk is None else f"root:dir={disk}"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *self._command((f"--overlay2={overlay}", *words)),
                stdin=ends[0],
                stdout=ends[1],
                stderr=file,
                start_new_session=True,
            )
            code = await _wait(process, process.wait(), f"{PROGRAM} {words[0]}")
        if code != 0:
            raise RunscError(f"runsc {words[0]} failed: {tail(log)}")

    async def call(self, *words: str) -> str:
        return await _output(self._command(words))

    async def containers(self) -> list[str]:
        if not self.state.is_dir():
            return []
        said = await self.call("list", "-format=json")
        return [str(each["id"]) for each in json.loads(said or "null") or ()]

    async def end(self, container: str) -> None:
        await self.call("delete", "--force", container)

    def _command(self, words: Sequence[str]) -> tuple[str, ...]:
        return (PROGRAM, "--root", str(self.state), *self._flags, *words)


def tail(log: Path) -> str:
    """End of a log."""
    return log.read_bytes()[-_MAX_TOLD:].decode(errors="replace").strip()


async def _output(words: Sequence[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await _wait(process, process.communicate(), words[0])
    if process.returncode != 0:
        told = err[-_MAX_TOLD:].decode(errors="replace").strip()
        raise RunscError(f"{' '.join(words[-2:])} failed: {told}")
    return out.decode(errors="replace")


async def _wait(process: asyncio.subprocess.Process, end: Awaitable[_T], what: str) -> _T:
    """Wait for the end of a process; kills it after the limit.

    Raises:
        RunscError: the limit was reached.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            return await end
    except TimeoutError as cause:
        process.kill()
        await process.wait()
        raise RunscError(f"{what} did not end in {LIMIT_S:.0f} s") from cause
