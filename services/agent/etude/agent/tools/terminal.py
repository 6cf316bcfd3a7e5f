"""Tools run_terminal and finish: runs commands, ends the rollout."""

from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from etude.agent.tools.base import Access, ErrorKind, Tool, ToolOutcome
from etude.agent.tools.truncation import Dropped, truncate
from etude.agent.workspace import ExecResult, Workspace

CAP_BYTES = 30 << 10
Command = Annotated[str, Field(min_length=1, max_length=65_536, pattern=r"^[^\x00]+$")]
"""One argument of `sh -c`: the kernel takes 128 KiB, and no NUL."""

LIMITS = {
    "time": "its time was over",
    "memory": "it used too much memory",
    "output": "it printed too much",
    "disk": "no disk space is left",
}
"""Reasons for ending a command early, worded for the policy."""


class RunTerminal(Tool):
    """Run a shell command in the workspace; its processes end with it."""

    access: ClassVar[Access] = Access.ALL
    command: Command
    """Command line for the shell."""
    timeout: Annotated[int, Field(ge=1, le=600)] = 120
    """Seconds after which it is stopped; without it, a background command runs on."""
    is_background: bool = False
    """Do not wait for its end: it gets a number for terminal_io."""

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        if self.is_background:
            timeout_s = self.timeout if "timeout" in self.model_fields_set else None
            job = await workspace.jobs.start(self.command, timeout_s=timeout_s)
            return ToolOutcome(content=f"Job {job} runs in the background: see terminal_io.")
        done = await workspace.exec(self.command, timeout_s=self.timeout)
        return command_outcome(done, cap_bytes=CAP_BYTES, status=self._status(done))

    def _status(self, done: ExecResult) -> str:
        if done.timed_out:
            return f"[stopped after {self.timeout} s]"
        return stop_status(done) or (f"[exit code {done.exit_code}]" if done.exit_code else "")


class Finish(Tool):
    """End the work."""

    access: ClassVar[Access] = Access.END
    message: str = ""
    """What was done, for the user."""

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        return ToolOutcome(content="Finished.")


def stop_status(done: ExecResult) -> str:
    """Reason for ending a command, other than its time limit; empty if it ended normally."""
    is_other = done.ended_for in LIMITS and done.ended_for != "time"
    return f"[stopped: {LIMITS[done.ended_for]}]" if is_other else ""


def command_outcome(done: ExecResult, *, cap_bytes: int, status: str) -> ToolOutcome:
    """Output within its cap, without its last newlines, and the status on a line of its own."""
    cut = truncate(
        done.output,
        cap_bytes=cap_bytes,
        rest="redirect the output to a file and read it in parts",
        dropped=Dropped(done.dropped_bytes, done.dropped_lines),
    )
    parts = [part for part in (cut.text.rstrip("\n"), status) if part]
    return ToolOutcome(
        content="\n".join(parts) or "(no output)",
        kind=ErrorKind.TIMEOUT if done.timed_out else ErrorKind.NONE,
        omitted_bytes=cut.omitted_bytes,
        cpu_ms=done.cpu_ms,
    )
