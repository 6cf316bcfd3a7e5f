"""What the process driver and its warm server tell each other."""

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.envserver.drivers.base import Command, Outcome, SandboxError
from etude.envserver.drivers.sandbox.layout import Job


def job(job_id: int, command: Command, leases: Path) -> Job:
    """A command as the server takes it."""
    return Job(
        job_id=job_id,
        command=command.command,
        workspace=str(command.workspace.relative_to(leases)),
        tests=str(command.tests.relative_to(leases)) if command.tests else "",
        timeout_s=command.timeout_s,
        head_bytes=command.head_bytes,
        tail_bytes=command.tail_bytes,
        collect=command.collect,
    )


def outcome(header: Mapping[str, Any], body: bytes) -> Outcome:
    """What a supervisor reports, from the line before the output and from what follows it."""
    size = header["output_bytes"]
    return Outcome(
        output=body[:size],
        exit_code=header["exit_code"],
        timed_out=header["timed_out"],
        ended_for=header["ended_for"],
        dropped_bytes=header["dropped_bytes"],
        dropped_lines=header["dropped_lines"],
        cpu_ms=header["cpu_ms"],
        wall_ms=header["wall_ms"],
        collected=body[size:] if header["has_collected"] else None,
    )


def encoded(content: Mapping[str, object]) -> bytes:
    """A message; only control characters take more bytes than in the command itself."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")


async def send(channel: socket.socket, message: bytes) -> None:
    """Send a message as one packet.

    Raises:
        SandboxError: the server has ended.
    """
    try:
        await asyncio.get_running_loop().sock_sendall(channel, message)
    except OSError as cause:
        raise SandboxError(f"the sandbox server does not listen: {cause}") from cause
