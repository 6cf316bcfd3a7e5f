"""Screen of `etude agent`: a conversation as text, and the questions to the user."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rich.text import Text
from typing_extensions import override

from etude.agent.interactive.session import Screen
from etude.agent.interactive.user_workspace import Approver, Decision, Edit
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.cli.output import SafeConsole, console, escape_controls, say

MAX_SHOWN_LINES = 400
"""Lines of one diff; the rest is counted."""
_STYLES = {"+": "green", "-": "red", "@": "cyan"}
_MAX_CALL_CHARS = 160


@dataclass(slots=True)
class TextScreen(Screen, Approver):
    """Lines for people; colours on a terminal."""

    accepts_edits: bool
    """Edits are shown, and not asked for."""
    accepts_commands: bool
    ask: Callable[[str], Awaitable[str]] | None
    """Reads the answer to a question; None without a terminal."""
    screen: SafeConsole = field(default_factory=console)
    label: str = ""
    """Before each message and call, where several conversations go on."""

    @override
    def show_message(self, text: str) -> None:
        self.screen.print(Text(self.label + text.strip()))

    @override
    def show_call(self, call: ToolCall, outcome: ToolOutcome) -> None:
        values = json.loads(call.arguments_json)
        told = " ".join(str(value) for value in values.values()).split("\n", 1)[0]
        mark = "!" if outcome.is_error else "·"
        line = f"{self.label}{mark} {call.name} {told}"[:_MAX_CALL_CHARS]
        self.screen.print(Text(line, style="dim"))
        if outcome.is_error:
            self.screen.print(Text(outcome.content[:1_000], style="yellow"))

    @override
    async def decide_edit(self, edit: Edit) -> Decision:
        self.show_diff(edit.diff)
        if not edit.diff:
            self.screen.print(f"{edit.path}: not text, or the same as before")
        verb = "delete" if edit.is_deletion else "edit"
        return await self._decide(f"{verb} {edit.path}?", is_free=self.accepts_edits)

    @override
    async def decide_command(self, command: str) -> Decision:
        self.screen.print(Text(f"$ {command}", style="bold"))
        return await self._decide("run it?", is_free=self.accepts_commands)

    def show_diff(self, lines: Sequence[str]) -> None:
        """Show a diff, up to a number of lines."""
        for line in lines[:MAX_SHOWN_LINES]:
            self.screen.print(Text(line, style=_STYLES.get(line[:1], "")))
        if len(lines) > MAX_SHOWN_LINES:
            self.screen.print(f"… {len(lines) - MAX_SHOWN_LINES} more lines")

    async def _decide(self, question: str, *, is_free: bool) -> Decision:
        if is_free:
            return Decision.NOT_ASKED
        if self.ask is None:
            say(f"{question} no: without a terminal nobody can be asked; see --yes and --commands")
            return Decision.REJECTED
        answer = await self.ask(f"{question} [y/N] ")
        is_yes = answer.strip().lower() in {"y", "yes"}
        return Decision.ACCEPTED if is_yes else Decision.REJECTED


@dataclass(slots=True)
class TerminalInput:
    """Lines of a terminal, read without a thread: Ctrl-C ends a question."""

    descriptor: int = 0
    _waiting: bytearray = field(default_factory=bytearray)

    def read_line(self, question: str) -> str:
        """Ask outside of the event loop; empty at the end of input."""
        self._waiting.clear()
        _write(question)
        while self._read():
            pass
        return self._take()

    async def ask(self, question: str) -> str:
        """Ask inside of the event loop; empty at the end of input."""
        self._waiting.clear()
        _write(question)
        loop = asyncio.get_running_loop()
        is_open = True
        while is_open:
            ready = asyncio.Event()
            loop.add_reader(self.descriptor, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self.descriptor)
            is_open = self._read()
        return self._take()

    def _read(self) -> bool:
        """Read what is there; false once a line is whole, or at the end of input."""
        data = os.read(self.descriptor, 1 << 16)
        self._waiting += data
        return bool(data) and b"\n" not in data

    def _take(self) -> str:
        line = self._waiting.decode("utf-8", "replace")
        self._waiting.clear()
        return line


def _write(question: str) -> None:
    """Write a question, in which the policy may have named a path: on one line, as it is."""
    sys.stderr.write(escape_controls(question).replace("\n", "␊"))
    sys.stderr.flush()
