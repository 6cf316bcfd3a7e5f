"""Shell commands inside a guest, and their limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.agent.workspace import ExecResult
from etude.envserver.guest import replies
from etude.envserver.guest.calls import GuestCaller, GuestReply, GuestRequest
from etude.envserver.isolation import sandbox_layout
from etude.envserver.isolation.output import HEAD_BYTES, TAIL_BYTES
from etude.v1 import guest_pb2

_TOO_LONG = ExecResult(output=b"sh: argument list too long\n", exit_code=126)
_SPARE_S = sandbox_layout.TERM_GRACE_S + 1.0
"""Time that a guest needs to end a command whose time is over."""
_FREE_DISK_BYTES = 8 << 20
"""Kept free on a guest's own disk, for its shell and its agent."""


def guest_limits(
    *,
    processes: int | None = None,
    open_files: int | None = None,
    file_bytes: int | None = None,
) -> guest_pb2.GuestLimits:
    """Limits of one command in a guest; those that are not given are the defaults.

    None is on address space: runtimes reserve many times what they use, and memory is the guest's.
    """
    return guest_pb2.GuestLimits(
        processes=processes or sandbox_layout.GUEST_PROCESSES,
        open_files=open_files or sandbox_layout.GUEST_OPEN_FILES,
        file_bytes=file_bytes or sandbox_layout.GUEST_FILE_BYTES,
        flood_bytes=sandbox_layout.FLOOD_BYTES,
        min_free_bytes=_FREE_DISK_BYTES,
    )


DEFAULT_LIMITS = guest_limits()


class CommandSettings(NamedTuple):
    """Environment variables and limits of commands."""

    environment: Mapping[str, str]
    limits: guest_pb2.GuestLimits


@dataclass(slots=True, kw_only=True)
class GuestCommands:
    """Runs commands one after the other or at the same time; each starts in the workspace."""

    channel: GuestCaller
    environment: Mapping[str, str] = field(default_factory=lambda: dict(sandbox_layout.ENVIRONMENT))
    limits: guest_pb2.GuestLimits = field(default_factory=lambda: DEFAULT_LIMITS)
    head_bytes: int = HEAD_BYTES
    tail_bytes: int = TAIL_BYTES
    uid: int | None = None
    """User of the commands; None is the sandbox's user."""

    async def run(self, command: str, timeout_s: float) -> ExecResult:
        """Run a line of shell; processes that it leaves behind are ended with it.

        Raises:
            WorkspaceLostError: the guest failed.
        """
        line = command.encode("utf-8", "surrogatepass")
        if len(line) >= sandbox_layout.MAX_COMMAND_BYTES:
            return _TOO_LONG
        call = guest_pb2.GuestCall(
            exec=guest_pb2.GuestExec(
                shell=line,
                env=self.environment,
                timeout_ms=max(1, round(timeout_s * 1000)),
                head_bytes=self.head_bytes,
                tail_bytes=self.tail_bytes,
                merged=True,
                limits=self.limits,
            ),
            uid=self.uid,
        )
        # The guest's own limit comes first; the deadline is for a guest that forgets it.
        request = GuestRequest(operation=call, deadline_s=timeout_s + _SPARE_S)
        return exec_result(replies.check_reply(await self.channel.call(request), ""))


def exec_result(reply: GuestReply) -> ExecResult:
    """Result of a command for tools."""
    done = reply.result.exec
    return ExecResult(
        output=reply.data.get(1, b""),
        exit_code=128 + done.signal if done.signal else done.exit_code,
        timed_out=done.timed_out,
        ended_for=done.ended_for,
        cpu_ms=reply.result.usage.cpu_us // 1000,
        dropped_bytes=done.dropped_out,
        dropped_lines=done.dropped_lines_out,
    )
