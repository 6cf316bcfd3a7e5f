"""MCP servers as sources of tools: each tool starts the server in the environment and calls it.

What the policy is shown is a file of the package, which the author lists once (`mcp_listing`), so
a server that changes its descriptions changes no prompt, and all sides of a run have equal ones.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, create_model
from typing_extensions import override

from etude.agent.tools.base import Access, ErrorKind, Tool, ToolOutcome
from etude.agent.tools.mcp_exchange import read_answer, write_script
from etude.agent.tools.terminal import CAP_BYTES
from etude.agent.tools.truncation import truncate
from etude.agent.workspace import Workspace

MAX_LISTING_BYTES = 1 << 20
_MAX_TOOLS = 64
_MAX_PARTS = 2_000
_MAX_DEPTH = 32


class ListedTool(BaseModel):
    """One tool of an answer to `tools/list`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
    description: Annotated[str, Field(min_length=1, max_length=8_192)]
    schema_of_arguments: Annotated[dict[str, JsonValue], Field(alias="inputSchema")]


class ToolListing(BaseModel):
    """Answer to `tools/list`, complete."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    tools: Annotated[tuple[ListedTool, ...], Field(min_length=1, max_length=_MAX_TOOLS)]
    next_cursor: Annotated[None, Field(alias="nextCursor")] = None
    """Servers that list their tools in parts are refused."""


class McpTool(Tool):
    """One call of a server's tool."""

    access: ClassVar[Access] = Access.ALL
    listed: ClassVar[ListedTool]
    command: ClassVar[tuple[str, ...]]
    timeout_s: ClassVar[float]

    @classmethod
    @override
    def model_json_schema(cls, *_: Any, **__: Any) -> dict[str, Any]:
        return {**cls.listed.schema_of_arguments, "description": cls.listed.description}

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        arguments = self.model_dump(by_alias=True, exclude_unset=True)
        parameters: dict[str, JsonValue] = {"name": self.listed.name, "arguments": arguments}
        script = write_script(self.command, "tools/call", parameters)
        done = await workspace.exec(script, timeout_s=self.timeout_s)
        result = read_answer(done)
        cut = truncate(_text(result), cap_bytes=CAP_BYTES, rest="ask for less")
        return ToolOutcome(
            content=cut.text or "(no output)",
            kind=ErrorKind.TOOL if result.get("isError") is True else ErrorKind.NONE,
            omitted_bytes=cut.omitted_bytes,
            cpu_ms=done.cpu_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """A server over standard streams, and its tools by the name that the policy calls."""

    command: tuple[str, ...]
    """Program and arguments, in the environment's image."""
    tools: Mapping[str, type[Tool]]


def read_server(command: Sequence[str], listing: Path, *, timeout_s: float = 60.0) -> McpServer:
    """Read the listing of a server's tools.

    Args:
        command: program and arguments, in the environment's image.
        listing: file with the answer to `tools/list`.
        timeout_s: of one call, with the server's start.

    Raises:
        ValueError: the listing cannot be used; the message says why.
    """
    if not command or not 0 < timeout_s <= 600:
        raise ValueError("an MCP server needs a command, and up to 600 s for a call")
    with listing.open("rb") as file:
        data = file.read(MAX_LISTING_BYTES + 1)
    found = parse_listing(data)
    tools = {tool.name: _make_tool(tool, tuple(command), timeout_s) for tool in found.tools}
    return McpServer(command=tuple(command), tools=tools)


def parse_listing(data: bytes) -> ToolListing:
    """Parse an answer to `tools/list`.

    Raises:
        ValueError: it is too large, no listing, names a tool twice, or has a schema without end.
    """
    if len(data) > MAX_LISTING_BYTES:
        raise ValueError(f"the listing is longer than {MAX_LISTING_BYTES} bytes")
    found = ToolListing.model_validate_json(data)
    names = [tool.name for tool in found.tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the listing names tools twice: {', '.join(twice)}")
    for tool in found.tools:
        schema = tool.schema_of_arguments
        _count_parts(tool.name, schema, schema.get("$defs"), _MAX_DEPTH)
    return found


def _count_parts(name: str, value: JsonValue, parts: JsonValue, depth: int) -> int:
    """Count what a schema becomes when its parts are inlined.

    Raises:
        ValueError: too much, or no end of it.
    """
    if depth == 0:
        raise ValueError(f"{name}: its schema is nested too deeply, or refers to itself")
    inside: list[JsonValue] = []
    if isinstance(value, dict):
        inside += [each for key, each in value.items() if key not in {"$defs", "$ref"}]
        if "$ref" in value:
            part = str(value["$ref"]).removeprefix("#/$defs/")
            if not isinstance(parts, dict) or part not in parts:
                raise ValueError(f"{name}: its schema refers to {str(value['$ref'])[:80]!r}")
            inside.append(parts[part])
    elif isinstance(value, list):
        inside += value
    total = 1
    for each in inside:
        total += _count_parts(name, each, parts, depth - 1)
        if total > _MAX_PARTS:
            raise ValueError(f"{name}: its schema has more than {_MAX_PARTS} parts")
    return total


def _make_tool(listed: ListedTool, command: tuple[str, ...], timeout_s: float) -> type[Tool]:
    schema = listed.schema_of_arguments
    match schema.get("properties", {}), schema.get("required", []):
        case dict(properties), list(required):
            pass
        case _:
            raise ValueError(f"{listed.name}: its schema is not that of an object")
    fields: dict[str, Any] = {
        f"argument_{number}": (
            _type_of(each),
            Field(alias=name) if name in required else Field(alias=name, default=None),
        )
        for number, (name, each) in enumerate(properties.items())
    }
    made = create_model(listed.name, __base__=McpTool, __doc__=listed.description, **fields)
    made.listed, made.command, made.timeout_s = listed, command, timeout_s
    return made


_PLAIN: Mapping[str, type] = {"string": str, "integer": int, "number": float, "boolean": bool}


def _type_of(schema: JsonValue) -> object:
    """Type of an argument; the server checks what this leaves open."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str) and kind in _PLAIN:
        return _PLAIN[kind]
    return Annotated[JsonValue, BeforeValidator(_parse_text)]


def _parse_text(value: object) -> object:
    """Lists and objects arrive as JSON in a text where the form of calls has texts alone."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(result: Mapping[str, JsonValue]) -> str:
    """The texts of a result; other parts are named."""
    content = result.get("content")
    shown = list[str]()
    for part in content if isinstance(content, list) else ():
        match part:
            case {"type": "text", "text": str(text)}:
                shown.append(text)
            case {"type": str(kind)}:
                shown.append(f"[{kind[:40]}, which cannot be shown]")
            case _:
                pass
    return "\n".join(shown)
