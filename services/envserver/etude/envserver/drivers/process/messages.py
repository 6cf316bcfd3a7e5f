"""Messages between the process driver and its sandbox server."""

import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.envserver.drivers.accesses import Access, AccessKind, AccessReport
from etude.envserver.drivers.base import CommandOutcome
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.programs import Program
from etude.envserver.isolation.sandbox_layout import CommandLimits, SandboxJob


def command_job(
    job_id: int,
    command: FolderCommand,
    leases: Path,
    *,
    has_egress: bool,
    limits: CommandLimits,
) -> SandboxJob:
    """Encode a command as a job of the server."""
    return SandboxJob(
        job_id=job_id,
        command=command.command,
        workspace=str(command.workspace.relative_to(leases)),
        tests=str(command.tests.relative_to(leases)) if command.tests else "",
        timeout_s=command.timeout_s,
        head_bytes=command.head_bytes,
        tail_bytes=command.tail_bytes,
        collect=command.collect,
        env=dict(command.environment),
        logs_accesses=command.tests is None,
        has_egress=has_egress,
        limits=limits,
    )


def program_job(
    job_id: int, program: Program, workspace: str, *, has_egress: bool, limits: CommandLimits
) -> SandboxJob:
    """Encode a program as a job of the server; its descriptors are sent along."""
    return SandboxJob(
        job_id=job_id,
        command="",
        workspace=workspace,
        timeout_s=program.timeout_s,
        head_bytes=0,
        tail_bytes=0,
        argv=tuple(program.argv),
        cwd=program.cwd,
        env=dict(program.env),
        is_terminal=program.terminal is not None,
        shares_network=program.shares_network,
        has_egress=has_egress,
        limits=limits,
    )


def decode_report(header: Mapping[str, Any], body: bytes) -> CommandOutcome:
    """Decode a supervisor's report: a header line, then output and collected file."""
    size = header["output_bytes"]
    return CommandOutcome(
        output=body[:size],
        exit_code=header["exit_code"],
        timed_out=header["timed_out"],
        ended_for=header["ended_for"],
        dropped_bytes=header["dropped_bytes"],
        dropped_lines=header["dropped_lines"],
        cpu_ms=header["cpu_ms"],
        wall_ms=header["wall_ms"],
        collected=body[size:] if header["has_collected"] else None,
        accesses=AccessReport(
            tuple(Access(AccessKind(kind), path) for kind, path in header["accesses"]),
            is_complete=header["accesses_complete"],
        ),
    )


def encode(content: Mapping[str, object]) -> bytes:
    """Encode a message; only control characters take more bytes than in the command itself."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")


@dataclass(slots=True)
class ServerOutbox:
    """Queue of messages to the server, one packet each, in order; the socket buffer holds few.

    asyncio's `sock_sendall` waits for a socket on behalf of one caller only.
    """

    channel: socket.socket
    lost: Callable[[str], None]
    """Callback with the reason when the server has ended."""
    _unsent: deque[tuple[bytes, Sequence[int]]] = field(default_factory=deque)

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message as soon as there is room; its descriptors are closed then."""
        self._unsent.append((message, descriptors))
        if len(self._unsent) == 1:
            self._flush()

    def close(self) -> None:
        while self._unsent:
            self._drop()
        asyncio.get_running_loop().remove_writer(self.channel)

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            try:
                message, descriptors = self._unsent[0]
                socket.send_fds(self.channel, [message], descriptors)
            except BlockingIOError:
                loop.add_writer(self.channel, self._flush)
                return
            except OSError as error:
                self.close()
                self.lost(f"the sandbox server does not listen: {error}")
                return
            self._drop()
        loop.remove_writer(self.channel)

    def _drop(self) -> None:
        _, descriptors = self._unsent.popleft()
        for descriptor in descriptors:
            os.close(descriptor)
