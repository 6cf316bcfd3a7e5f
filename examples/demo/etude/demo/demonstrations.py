"""A demonstrator carries out its intention with the real tools; the transcript is what happened."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from etude.agent import minitest, tool_calls, toolsets
from etude.agent.chat import Message
from etude.agent.tool_calls import MalformedCall, ParsedCall
from etude.agent.workspace import ExecResult, MemoryWorkspace, Workspace
from etude.demo import intentions
from etude.demo.intentions import Edit, Intention
from etude.demo.problems import Issue, Problem

COMPACT = toolsets.toolset("Compact")
DONE = "Done."
TEST_COMMAND = "pytest -q"


class Request(NamedTuple):
    """One call as the assistant writes it."""

    tool: str
    arguments: Mapping[str, str]


class Demonstration(NamedTuple):
    """One transcript and how it went."""

    problem: Problem
    messages: tuple[Message, ...]
    is_solved: bool


Execute = Callable[[Sequence[ParsedCall | MalformedCall]], Awaitable[Sequence[str]]]
"""Runs the calls of one turn and gives the texts that the policy would read."""


@dataclass(slots=True)
class Session:
    """A conversation in the making: what the assistant writes is parsed and run for real."""

    execute: Execute
    messages: list[Message] = field(default_factory=list)

    async def act(self, *requests: Request) -> Sequence[str]:
        """One turn of parallel calls, and what they return."""
        text = "".join(
            tool_calls.render_call(request.tool, request.arguments) for request in requests
        )
        results = list(await self.execute(tool_calls.parse_calls(text).calls))
        self.messages.append({"role": "assistant", "content": text})
        self.messages.append({"role": "tool", "content": results})
        return results

    def end(self) -> None:
        """The turn without a call that ends the work."""
        self.messages.append({"role": "assistant", "content": DONE})


def tools_on(workspace: Workspace) -> Execute:
    """The Compact tools on a workspace."""

    async def execute(requested: Sequence[ParsedCall | MalformedCall]) -> list[str]:
        outcomes = await toolsets.run_calls(COMPACT, workspace, requested)
        return [outcome.content for outcome in outcomes]

    return execute


def in_memory(problem: Problem) -> MemoryWorkspace:
    """The problem's files with the sandbox's test runner, in this process."""
    files = problem.workspace()

    async def run(command: str, timeout_s: float) -> ExecResult:
        del timeout_s
        if command != TEST_COMMAND:
            raise ValueError(f"demonstrators run {TEST_COMMAND!r} only, not {command!r}")
        verdict = minitest.run(files)
        return ExecResult(output=verdict.output.encode(), exit_code=verdict.exit_code)

    return MemoryWorkspace(files, run)


async def demonstrate(problem: Problem, random: Random) -> Demonstration:
    """One demonstrator with freshly drawn intentions, at work in memory."""
    workspace = in_memory(problem)
    messages = await follow(intentions.draw(problem, random), problem, tools_on(workspace))
    repaired = workspace.files[problem.repository.target.path].decode()
    return Demonstration(problem, tuple(messages), problem.is_solved_by(repaired))


async def follow(intention: Intention, problem: Problem, execute: Execute) -> list[Message]:
    """Carry out an intention with the given tools; returns the transcript."""
    session = Session(
        execute,
        [
            {"role": "system", "content": COMPACT.system_prompt},
            {"role": "user", "content": problem.instruction},
        ],
    )
    if not intention.gives_up:
        await _locate(session, problem)
        for path in intention.reads:
            await session.act(Request("read_file", {"path": path}))
        await _repair(session, intention)
    session.end()
    return session.messages


async def _locate(session: Session, problem: Problem) -> None:
    target = problem.repository.target
    search = Request("grep", {"pattern": f"def {target.name}"})
    tests = Request("run_terminal", {"command": TEST_COMMAND})
    match problem.issue:
        case Issue.FUNCTION:
            await session.act(search)
        case Issue.FILE:
            await session.act(tests)
        case Issue.NOTHING:
            await session.act(Request("list_dir", {"path": "."}), tests)
            await session.act(search)


async def _repair(session: Session, intention: Intention) -> None:
    tests = Request("run_terminal", {"command": TEST_COMMAND})
    for edit in intention.edits:
        if not edit.is_verified:
            await session.act(_replace(edit))
            return
        results = await session.act(_replace(edit), tests)
        if "passed" in results[-1]:
            return


def _replace(edit: Edit) -> Request:
    return Request(
        "search_replace",
        {"path": edit.path, "old_string": edit.old, "new_string": edit.new},
    )
