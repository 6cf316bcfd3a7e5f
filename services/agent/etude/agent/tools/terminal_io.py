"""Tool terminal_io: reads, feeds and ends background commands."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from etude.agent.tools.base import Access, Tool, ToolError, ToolOutcome
from etude.agent.tools.terminal import CAP_BYTES, LIMITS
from etude.agent.tools.truncation import TruncatedText, head_end, tail_start, truncate
from etude.agent.workspace import JobState, Workspace
from etude.agent.workspace.jobs import INPUT_BYTES, Jobs

_TAKES = {
    "read": {"offset"},
    "await": {"offset", "timeout"},
    "kill": {"offset"},
    "stdin": {"input", "end_input"},
}


class TerminalIo(Tool):
    """Read the output of a background command, send it input, wait for its end, or end it."""

    access: ClassVar[Access] = Access.ALL
    job: Annotated[int, Field(ge=1, lt=1 << 31)]
    """Number that run_terminal gave."""
    op: Literal["read", "await", "kill", "stdin"]
    """read, await and kill show the output; await waits for the end first, kill brings it about."""
    offset: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    """Bytes of output to leave out, as they were seen before."""
    timeout: Annotated[int, Field(ge=1, le=600)] = 120
    """Longest wait of await, in seconds; the command runs on after it."""
    input: str = ""
    """What stdin sends; its last line is ended."""
    end_input: bool = False
    """After this the command finds the end of its input."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        extra = self.model_fields_set - _TAKES[self.op] - {"job", "op"}
        if extra:
            raise ValueError(f"op {self.op} takes no {', '.join(sorted(extra))}")
        return self

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        jobs = workspace.jobs
        if self.op == "stdin":
            return await self._send(jobs)
        if self.op == "kill":
            await jobs.kill(self.job)
        state = await jobs.state(self.job, wait_s=self.timeout if self.op == "await" else 0)
        if self.offset > state.log_bytes:
            raise ToolError(
                f"job {self.job} has printed {state.log_bytes} bytes;"
                f" offset {self.offset} is past them"
            )
        cut = await _show_output(jobs, self.job, self.offset, state.log_bytes)
        parts = [cut.text.rstrip("\n"), self._status(state)]
        return ToolOutcome(
            content="\n".join(part for part in parts if part),
            omitted_bytes=cut.omitted_bytes,
            cpu_ms=state.cpu_ms,
        )

    async def _send(self, jobs: Jobs) -> ToolOutcome:
        data = self.input.encode()
        data += b"\n" if data and not data.endswith(b"\n") else b""
        if len(data) > INPUT_BYTES:
            raise ToolError(f"{len(data)} bytes of input; a job takes {INPUT_BYTES} at once")
        if not data and not self.end_input:
            raise ToolError("there is nothing to send: give input, or set end_input")
        await jobs.send(self.job, data, end=self.end_input)
        ended = ", and ended its input" if self.end_input else ""
        return ToolOutcome(content=f"Sent {len(data)} bytes to job {self.job}{ended}.")

    def _status(self, state: JobState) -> str:
        how = f"has ended with exit code {state.exit_code}"
        if state.is_running:
            how = "runs"
        elif state.ended_for:
            how = f"was stopped: {LIMITS[state.ended_for]}"
        return f"[job {self.job} {how}; {state.log_bytes} bytes of output]"


async def _show_output(jobs: Jobs, job: int, offset: int, end: int) -> TruncatedText:
    """The output between two offsets, or only its two ends, without fetching the middle."""
    if end - offset <= CAP_BYTES:
        data = await jobs.output(job, offset=offset, size=end - offset)
        return truncate(data, cap_bytes=CAP_BYTES, rest="use offset")
    head = await jobs.output(job, offset=offset, size=CAP_BYTES // 4 + 1)
    start = end - (CAP_BYTES - CAP_BYTES // 4)
    tail = await jobs.output(job, offset=start - 1, size=end - start + 1)
    kept, skipped = head_end(head, len(head) - 1), tail_start(tail, 1)
    omitted = (start - 1 + skipped) - (offset + kept)
    marker = f"\n[... {omitted} bytes omitted; go on with offset={offset + kept} ...]\n"
    text = head[:kept].decode("utf-8", "replace") + marker
    return TruncatedText(text + tail[skipped:].decode("utf-8", "replace"), omitted)
