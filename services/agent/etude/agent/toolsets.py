"""Toolsets: a policy's tools, their description in its prompt, and the calls of one turn."""

import asyncio
import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pydantic import ValidationError

from etude.agent.patterns import PatternError
from etude.agent.tool_calls import MalformedCall, ParsedCall
from etude.agent.tool_formats.base import ToolFormat
from etude.agent.tool_formats.xml import XmlFormat
from etude.agent.tool_messages import NativeForm, ShownTools
from etude.agent.tools import (
    compact,
    files,
    grep,
    lints,
    patch,
    search_replace,
    terminal,
    terminal_io,
    todos,
)
from etude.agent.tools.base import Access, ErrorKind, Tool, ToolError, ToolOutcome
from etude.agent.tools.codebase_search import CodebaseSearch
from etude.agent.tools.mcp_server import McpServer
from etude.agent.workspace import JobError, Workspace, WorkspaceError, relative_path
from etude.common import extensions
from etude.common.errors import InvalidFieldError, Problem, UserError

MAX_ARGUMENT_CHARS = 512 << 10
ROLE = """\
You are a software engineer at work in one repository, the current folder of your tools. Find out \
what is asked, read before you change, make the smallest change that is right, and run the tests.\
"""
"""First paragraph of a system prompt."""
CALL_FORM = """\
Call tools in this form, several in one turn when they do not depend on each other:
<tool_call><function=NAME>
<parameter=ARGUMENT>
value
</parameter>
</function></tool_call>
Values are plain text, nothing is escaped. Lists have one item per line. Results come in the order \
of the calls.\
"""
"""Form of calls where the chat template shows no tools."""
_NATIVE_FORM = """\
Call several tools in one turn when they do not depend on each other. Results come in the order of \
the calls.\
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of one turn."""

    max_calls: int
    """Calls beyond it get an error and are not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolset:
    """Tools by name, their description for the policy, and the form of its calls."""

    name: str
    system_prompt: str
    """It describes the tools, unless `shown` does."""
    native_prompt: str
    """System prompt where the chat template shows the tools."""
    tools: Mapping[str, type[Tool]]
    limits: ToolLimits
    bad_call: str = ""
    """Fixed answer to every call that cannot run; unset: the answer has the reason."""
    tool_format: ToolFormat = field(default_factory=XmlFormat)
    """Form of the calls in a completion."""
    shown: ShownTools | None = None
    """Tools as the chat template shows them; None if the system prompt describes them."""

    def schemas(self) -> list[Mapping[str, object]]:
        """JSON schema of each tool."""
        return [tool_schema(name, tool) for name, tool in self.tools.items()]

    def with_tool(self, name: str, tool: type[Tool]) -> "Toolset":
        """The same tools and another one, for a chat template that does not show the tools yet."""
        row = json.dumps(tool_schema(name, tool)["function"])
        tools = {**self.tools, name: tool}
        return replace(self, system_prompt=f"{self.system_prompt}\n{row}", tools=tools)

    def with_form(self, form: NativeForm) -> "Toolset":
        """The same tools, which a model's own chat template shows."""
        return replace(
            self,
            system_prompt=self.native_prompt,
            tool_format=form.tool_format,
            shown=form.shown,
        )

    def refusal(self, why: str) -> ToolOutcome:
        """Outcome for the policy of a call that cannot run."""
        return ToolOutcome(content=self.bad_call or f"Error: {why}", kind=ErrorKind.INVALID)

    def bind(self, call: ParsedCall | MalformedCall) -> Tool | ToolOutcome:
        """Check a call's arguments: the bound tool, or the refusal to answer with."""
        if isinstance(call, MalformedCall):
            return self.refusal(f"malformed call: {call.reason}")
        tool = self.tools.get(call.name)
        if tool is None:
            return self.refusal(f"no tool {call.name[:80]!r}; there are {' '.join(self.tools)}")
        size = sum(len(value) for value in call.arguments.values() if isinstance(value, str))
        if max(size, len(call.raw)) > MAX_ARGUMENT_CHARS:
            return self.refusal(
                f"{call.name}: {max(size, len(call.raw))} characters of arguments;"
                f" the limit is {MAX_ARGUMENT_CHARS}"
            )
        try:
            return tool.model_validate(call.arguments)
        except ValidationError as error:
            return self.refusal(f"{call.name}: {_first_error(error, tool)}")

    def bind_turn(self, calls: Sequence[ParsedCall | MalformedCall]) -> list[Tool | ToolOutcome]:
        """`bind` for the calls of one turn, with the limit on their number."""
        most = self.limits.max_calls
        late = self.refusal(f"at most {most} calls in one turn; this one was not run")
        return [self.bind(call) if index < most else late for index, call in enumerate(calls)]


def toolset(name: str) -> Toolset:
    """The toolset of this name: of Etude, or one that an installed package registers.

    The name of an MCP server stands for the tools of Standard and those of the server.

    Raises:
        InvalidFieldError: there is none.
        UserError: a package's toolset is not installed or broken.
    """
    if extensions.is_extension(name):
        if extensions.is_installed(extensions.MCP_SERVERS, name):
            return _with_server(name)
        return extensions.load_extension(extensions.TOOLSETS, name, Toolset)
    found = _toolsets().get(name)
    if found is None:
        raise InvalidFieldError("toolset", f"{name!r} is none of {', '.join(_toolsets())}")
    return found


def _with_server(name: str) -> Toolset:
    """Make a toolset of the tools of Standard and those of a package's MCP server.

    Raises:
        UserError: the server is not installed or broken, or two tools have one name.
    """
    server = extensions.load_extension(extensions.MCP_SERVERS, name, McpServer)
    standard = _toolsets()["Standard"].tools
    taken = sorted(standard.keys() & server.tools.keys())
    if taken or extensions.is_installed(extensions.TOOLSETS, name):
        what = f"has tools of Standard's names: {', '.join(taken)}" if taken else "is a toolset too"
        fix = "register a toolset made of the tools that you want, under a name of its own"
        problem = Problem("ExtensionBroken", f"{name} {what}", extensions.MCP_SERVERS, fix)
        raise UserError(problem)
    return make_toolset(name, {**standard, **server.tools})


def list_schemas() -> Iterator[list[Mapping[str, object]]]:
    """List the JSON schemas of the tools of each toolset."""
    return (each.schemas() for each in _toolsets().values())


@functools.cache
def _toolsets() -> dict[str, Toolset]:
    return {each.name: each for each in (_standard(), _compact())}


def _standard() -> Toolset:
    tools: dict[str, type[Tool]] = {
        "read_file": files.ReadFile,
        "write_file": files.WriteFile,
        "search_replace": search_replace.SearchReplace,
        "apply_patch": patch.ApplyPatch,
        "delete_file": files.DeleteFile,
        "list_dir": files.ListDir,
        "glob": files.Glob,
        "grep": grep.Grep,
        "codebase_search": CodebaseSearch,
        "run_terminal": terminal.RunTerminal,
        "terminal_io": terminal_io.TerminalIo,
        "read_lints": lints.ReadLints,
        "todo_write": todos.TodoWrite,
        "finish": terminal.Finish,
    }
    return make_toolset("Standard", tools)


def make_toolset(
    name: str, tools: Mapping[str, type[Tool]], *, role: str = ROLE, max_calls: int = 64
) -> Toolset:
    """Make a toolset whose prompt describes each tool by its docstring and its fields.

    Args:
        name: in manifests.
        tools: by the name that the policy calls.
        role: first paragraph of the system prompt.
        max_calls: of one turn.

    Raises:
        ValueError: a tool lacks its description or says not how its calls may overlap.
    """
    for key, tool in tools.items():
        if not (tool.__doc__ or "").strip() or not hasattr(tool, "access"):
            raise ValueError(f"tool {key}: {tool.__name__} needs a docstring and `access`")
    rows = [json.dumps(tool_schema(key, tool)["function"]) for key, tool in tools.items()]
    finish = ", and so does finish" if "finish" in tools else ""
    ending = f"A turn without a call ends the work{finish}."
    return Toolset(
        name=name,
        system_prompt="\n".join([role, "", f"{CALL_FORM} {ending}", "", "Tools:", *rows]),
        native_prompt=f"{role}\n\n{_NATIVE_FORM} {ending}",
        tools=dict(tools),
        limits=ToolLimits(max_calls=max_calls),
    )


def _compact() -> Toolset:
    tools: dict[str, type[Tool]] = {
        "read_file": compact.ReadFile,
        "search_replace": compact.SearchReplace,
        "list_dir": compact.ListDir,
        "grep": compact.Grep,
        "run_terminal": compact.RunTerminal,
    }
    rows = [f"{name}({', '.join(tool.model_fields)})" for name, tool in tools.items()]
    return Toolset(
        name="Compact",
        system_prompt=f"Fix the bug. Tools: {' '.join(rows)}",
        native_prompt="Fix the bug.",
        tools=tools,
        limits=ToolLimits(max_calls=8),
        bad_call="Error: bad call",
    )


def tool_schema(name: str, tool: type[Tool]) -> dict[str, object]:
    """One tool as a JSON schema of its function."""
    parameters = tool.model_json_schema()
    description = parameters.pop("description", "")
    told = _inline_schema(parameters, parameters.pop("$defs", {}))
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": told},
    }


def _inline_schema(value: object, parts: Mapping[str, object]) -> object:
    """A schema without titles and with its parts inlined, to keep the prompt short."""
    if isinstance(value, list):
        return [_inline_schema(each, parts) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        part = parts[str(value["$ref"]).rpartition("/")[2]]
        rest = {key: each for key, each in value.items() if key != "$ref"}
        return _inline_schema({**part, **rest} if isinstance(part, dict) else rest, parts)
    return {
        key: _inline_schema(each, parts)
        for key, each in value.items()
        if key != "title" or not isinstance(each, str)
    }


async def run_calls(
    tools: Toolset, workspace: Workspace, calls: Sequence[ParsedCall | MalformedCall]
) -> list[ToolOutcome]:
    """Run the calls of one turn; results come in call order, and a failed call stops no other.

    The results are those of running the calls one after the other. Calls that cannot see each
    other's effects run concurrently: reads with reads, changes of different files.

    Raises:
        WorkspaceLostError: the platform failed, and there are no results.
    """
    outcomes: dict[int, ToolOutcome] = {}
    wave: list[_BoundCall] = []
    for index, bound in enumerate(tools.bind_turn(calls)):
        if isinstance(bound, ToolOutcome):
            outcomes[index] = bound
            continue
        step = _BoundCall(index, bound, _target(bound))
        if any(_conflict(step, other) for other in wave):
            outcomes |= await _run(wave, workspace)
            wave = []
        wave.append(step)
    outcomes |= await _run(wave, workspace)
    return [outcomes[index] for index in range(len(calls))]


class _BoundCall(NamedTuple):
    position: int
    """Index in the turn."""
    tool: Tool
    target: str


def _target(tool: Tool) -> str:
    try:
        return relative_path(tool.target)
    except WorkspaceError:
        return tool.target


def _conflict(one: _BoundCall, other: _BoundCall) -> bool:
    """True if the order of the two can change a result."""
    pair = {one.tool.access, other.tool.access}
    if pair & {Access.ALL, Access.END}:
        return True
    if Access.NOTE in pair:
        return len(pair) == 1
    if Access.WRITE not in pair:
        return False
    return Access.TREE in pair or one.target == other.target


async def _run(steps: Sequence[_BoundCall], workspace: Workspace) -> dict[int, ToolOutcome]:
    if len(steps) <= 1:
        return {step.position: await _outcome(step.tool, workspace) for step in steps}
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_outcome(step.tool, workspace), name=f"call-{step.position}")
                for step in steps
            ]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return {step.position: task.result() for step, task in zip(steps, tasks, strict=True)}


async def _outcome(tool: Tool, workspace: Workspace) -> ToolOutcome:
    started_s = time.monotonic()
    outcome = await _answer(tool, workspace)
    return replace(outcome, wall_ms=round(1000 * (time.monotonic() - started_s)))


async def _answer(tool: Tool, workspace: Workspace) -> ToolOutcome:
    try:
        return await tool.run(workspace)
    except ToolError as error:
        return ToolOutcome(content=f"Error: {error}", kind=error.kind)
    except (WorkspaceError, PatternError, JobError) as error:
        return ToolOutcome(content=f"Error: {error}", kind=ErrorKind.TOOL)


def _first_error(error: ValidationError, tool: type[Tool]) -> str:
    """The first error of the arguments, worded for the policy."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    name = str(first["loc"][0])[:80]
    names = [field.alias or key for key, field in tool.model_fields.items()]
    if first["type"] == "missing":
        return f"argument {name!r} is missing"
    if first["type"] == "extra_forbidden":
        return f"there is no argument {name!r}; it takes {', '.join(names)}"
    return f"argument {name!r}: {first['msg'].removeprefix('Value error, ')}"
