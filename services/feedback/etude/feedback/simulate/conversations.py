"""Conversations of simulated users with a served policy, through the `openai` client."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import openai
from openai.types.chat import ChatCompletionMessage

from etude.agent import minitest, tool_calls, toolsets
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.feedback.simulate.user_tasks import UserTask
from etude.feedback.simulate.users import HiddenTaste

TOOLS = toolsets.toolset("Compact")
ROLLOUT, VERSION = "x-etude-rollout", "x-policy-version"
MAX_TURNS = 8
MAX_TURN_TOKENS = 80
TEST_COMMANDS = frozenset({"pytest", "pytest -q", "python -m pytest"})
TESTS_S = 5
"""CPU seconds of one run of a user's tests, which are written in part by the policy."""
_ANSWERS = ("You can find it.", "Fix it.", "Look at the tests.")
_NOT_FOUND = 127


class ConversationEnd(StrEnum):
    """End of a conversation."""

    FINISHED = "Finished"
    """The policy ended its work."""
    QUESTION = "Question"
    """The policy asked once more than the user answers."""
    BROKEN_CALL = "BrokenCall"
    """The policy's last turn is a tool call that cannot be read."""
    TURN_LIMIT = "TurnLimit"
    FAILED = "Failed"
    """The request failed: the gateway's fault, and not the policy's."""


class SeenTurn(NamedTuple):
    """One turn of the policy, as a client sees it."""

    wall_s: float
    num_calls: int
    num_broken_calls: int


class SeenEdit(NamedTuple):
    """Lines that one turn added to one file."""

    turn: int
    path: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation, as its user saw it."""

    rollout: str
    """Name that the gateway gave; empty if no request succeeded."""
    version: str
    """Policy version of the last turn."""
    task: UserTask
    turns: tuple[SeenTurn, ...]
    edits: tuple[SeenEdit, ...]
    num_questions: int
    is_tested: bool
    """Tests ran after the last edit."""
    ending: ConversationEnd
    files: Mapping[str, bytes]
    """The user's folder at the end."""


@dataclass(slots=True)
class UserDesk:
    """A user at work on one task: the folder, the messages, and the client."""

    client: openai.AsyncOpenAI
    """With the user's key, and no retries."""
    model: str
    task: UserTask
    taste: HiddenTaste
    random: Random
    messages: list[Any] = field(default_factory=list)
    turns: list[SeenTurn] = field(default_factory=list)
    edits: list[SeenEdit] = field(default_factory=list)
    num_questions: int = 0
    is_tested: bool = False
    rollout: str = ""
    version: str = ""
    _files: dict[str, bytes] = field(default_factory=dict)

    async def converse(self) -> Conversation:
        """Work on the task until it is done, or the user has enough."""
        self._files = {**self.task.files}
        workspace = MemoryWorkspace(self._files, self._run_command)
        self.messages = [
            {"role": "system", "content": TOOLS.native_prompt},
            {"role": "user", "content": self.task.instruction},
        ]
        ending = ConversationEnd.TURN_LIMIT
        while len(self.turns) < MAX_TURNS:
            try:
                message = await self._ask()
            except openai.OpenAIError:
                ending = ConversationEnd.FAILED
                break
            end = await self._react(message, workspace)
            if end is not None:
                ending = end
                break
        return Conversation(
            rollout=self.rollout,
            version=self.version,
            task=self.task,
            turns=(*self.turns,),
            edits=(*self.edits,),
            num_questions=self.num_questions,
            is_tested=self.is_tested,
            ending=ending,
            files={**self._files},
        )

    async def _ask(self) -> ChatCompletionMessage:
        """Ask for one turn."""
        started_s = time.monotonic()
        answer = await self.client.chat.completions.with_raw_response.create(
            model=self.model,
            messages=self.messages,
            tools=TOOLS.schemas(),
            max_tokens=MAX_TURN_TOKENS,
            seed=self.random.getrandbits(48),
        )
        self.rollout = answer.headers[ROLLOUT]
        self.version = answer.headers[VERSION]
        message: ChatCompletionMessage = answer.parse().choices[0].message
        malformed = tool_calls.parse_calls(message.content or "").calls
        calls = message.tool_calls or []
        wall_s = time.monotonic() - started_s
        self.turns.append(SeenTurn(wall_s, len(calls), len(malformed)))
        self.messages.append(message.model_dump(exclude_none=True))
        return message

    async def _react(
        self, message: ChatCompletionMessage, workspace: MemoryWorkspace
    ) -> ConversationEnd | None:
        """Run the calls of a turn, or answer it; the ending if the conversation is over."""
        if message.tool_calls:
            await self._run_calls(message.tool_calls, workspace)
            return None
        if self.turns[-1].num_broken_calls:
            return ConversationEnd.BROKEN_CALL
        if not (message.content or "").rstrip().endswith("?"):
            return ConversationEnd.FINISHED
        self.num_questions += 1
        if self.num_questions > self.taste.num_answers:
            return ConversationEnd.QUESTION
        self.messages.append({"role": "user", "content": self.random.choice(_ANSWERS)})
        return None

    async def _run_calls(self, calls: Sequence[Any], workspace: MemoryWorkspace) -> None:
        parsed = [
            tool_calls.call_from_json(call.function.name, call.function.arguments) for call in calls
        ]
        before = {**self._files}
        outcomes = await toolsets.run_calls(TOOLS, workspace, parsed)
        self.messages += [
            {"role": "tool", "tool_call_id": call.id, "content": outcome.content}
            for call, outcome in zip(calls, outcomes, strict=True)
        ]
        for path, data in self._files.items():
            added = find_added_lines(before.get(path, b""), data)
            if added:
                self.edits.append(SeenEdit(len(self.turns) - 1, path, added))
                self.is_tested = False
        # Calls run in order, and the tests come after the edit wherever a turn has both.
        self.is_tested |= any(call.function.name == "run_terminal" for call in calls)

    async def _run_command(self, command: str, timeout_s: float) -> ExecResult:
        """Run the tests; the user's terminal knows no other command."""
        if command.strip() not in TEST_COMMANDS:
            return ExecResult(output=b"command not found\n", exit_code=_NOT_FOUND)
        return await run_tests(self._files, timeout_s)


def find_added_lines(before: bytes, after: bytes) -> tuple[str, ...]:
    """Find the lines that a change added, without their indentation and blank ones."""
    added = count_lines(after) - count_lines(before)
    return tuple(sorted(added.elements()))


def count_lines(data: bytes) -> "Counter[str]":
    """Count the lines of a file, without their indentation and blank ones."""
    lines = (line.strip() for line in data.decode("utf-8", "replace").splitlines())
    return Counter(line for line in lines if line)


async def run_tests(files: Mapping[str, bytes], timeout_s: float) -> ExecResult:
    """Run the tests among the files in a process of their own, within limits.

    Covered: endless loops and memory. Not covered: code that means harm; the policy of a
    simulation has seen nothing but generated repositories.
    """
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(_write_files, Path(folder), files)
        limits = f'ulimit -t {TESTS_S} -v 1048576; exec "$0" -I -S "$1"'
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", limits, sys.executable, minitest.__file__),
            cwd=folder,
            env={},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            return ExecResult(output=b"", exit_code=-signal.SIGKILL, timed_out=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return ExecResult(output=output, exit_code=process.returncode or 0)


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
