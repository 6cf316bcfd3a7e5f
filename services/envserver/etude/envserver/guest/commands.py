"""Shell commands inside a guest, under the same limits as with every driver."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
DEFAULT_LIMITS = guest_pb2.GuestLimits(
    processes=sandbox_layout.PROCESSES,
    open_files=sandbox_layout.OPEN_FILES,
    file_bytes=sandbox_layout.FILE_BYTES,
    memory_bytes=sandbox_layout.MEMORY_BYTES,
    flood_bytes=sandbox_layout.FLOOD_BYTES,
    min_free_bytes=_FREE_DISK_BYTES,
)


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
