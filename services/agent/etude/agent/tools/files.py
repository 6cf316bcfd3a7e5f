"""Tools that read, write, delete and list files."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from etude.agent import patterns
from etude.agent.tools import lints
from etude.agent.tools.base import Access, Texts, Tool, ToolError, ToolOutcome
from etude.agent.tools.truncation import truncate
from etude.agent.workspace import FileInfo, FileKind, PathFault, Workspace, WorkspaceError

CAP_BYTES = 64 << 10
_MAX_LINES = 2000
_SNIFFED_BYTES = 8192


class ReadFile(Tool):
    """Read a text file. Lines come as NUMBER|TEXT."""

    access: ClassVar[Access] = Access.READ
    path: str
    """File to read, relative to the workspace."""
    offset: Annotated[int, Field(ge=1)] = 1
    """First line to show, counted from 1."""
    limit: Annotated[int, Field(ge=1, le=_MAX_LINES)] = _MAX_LINES
    """Largest number of lines to show."""

    @property
    @override
    def target(self) -> str:
        return self.path

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        lines = text_lines(await workspace.read(self.path), self.path)
        if not lines and self.offset == 1:
            return ToolOutcome(content="(empty file)")
        if self.offset > len(lines):
            raise ToolError(
                f"{self.path} has {len(lines)} lines; offset {self.offset} is past them"
            )
        end = self.offset - 1 + self.limit
        numbered = [f"{n}|{line}" for n, line in enumerate(lines[:end], 1) if n >= self.offset]
        cut = truncate("\n".join(numbered), cap_bytes=CAP_BYTES, rest="use offset and limit")
        left = _omitted_lines(lines[end:], end + 1)
        omitted = cut.omitted_bytes + left.omitted_bytes
        return ToolOutcome(content=cut.text + left.content, omitted_bytes=omitted)


class WriteFile(Tool):
    """Create a file, or replace the whole content of one."""

    access: ClassVar[Access] = Access.WRITE
    path: str
    """File to write, relative to the workspace; missing folders are made."""
    content: str
    """The whole new content."""

    @property
    @override
    def target(self) -> str:
        return self.path

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        data = self.content.encode()
        before = await _read_existing(workspace, self.path)
        await workspace.write(self.path, data)
        done = f"{'Created' if before is None else 'Replaced'} {self.path} ({len(data)} bytes)."
        return ToolOutcome(
            content=done + await lints.after_edit(workspace, self.path, before or b"", data)
        )


class DeleteFile(Tool):
    """Delete one file."""

    access: ClassVar[Access] = Access.WRITE
    path: str
    """File to delete, relative to the workspace."""

    @property
    @override
    def target(self) -> str:
        return self.path

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        await workspace.delete(self.path)
        return ToolOutcome(content=f"Deleted {self.path}.")


class ListDir(Tool):
    """List one folder; folders end with a slash, and names that start with a dot are left out."""

    access: ClassVar[Access] = Access.TREE
    path: str = "."
    """Folder to list, relative to the workspace."""
    ignore_globs: Texts = ()
    """Names to leave out, as patterns like *.pyc."""

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        matchers = [patterns.glob_matcher(pattern) for pattern in self.ignore_globs]
        entries = [_entry(info) for info in await workspace.list(self.path)]
        names = [
            name
            for name in entries
            if not name.startswith(".")
            and not any(matcher.fullmatch(name.rstrip("/@").encode()) for matcher in matchers)
        ]
        return _one_per_line(names, nothing="(empty folder)", rest="list a folder below")


class Glob(Tool):
    """Find files by a path pattern, like src/**/*.py."""

    access: ClassVar[Access] = Access.TREE
    pattern: str
    """`*` and `?` stay within a name, `**` stands for any folders, {a,b} for either."""

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        paths = await workspace.glob(self.pattern)
        return _one_per_line(paths, nothing="No files match.", rest="use a narrower pattern")


def text_lines(data: bytes, path: str) -> list[str]:
    """The lines of a text file, without their ends.

    Raises:
        ToolError: the file is binary.
    """
    if b"\0" in data[:_SNIFFED_BYTES]:
        raise ToolError(f"{path} is a binary file of {len(data)} bytes")
    lines = data.decode("utf-8", "replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _omitted_lines(lines: Sequence[str], offset: int) -> ToolOutcome:
    """Marker for the lines after the last one shown."""
    if not lines:
        return ToolOutcome(content="")
    size = sum(len(line.encode()) + 1 for line in lines)
    text = f"\n[... {len(lines)} lines, {size} bytes omitted; go on with offset={offset} ...]"
    return ToolOutcome(content=text, omitted_bytes=size)


async def _read_existing(workspace: Workspace, path: str) -> bytes | None:
    try:
        return await workspace.read(path)
    except WorkspaceError as error:
        if error.fault in {PathFault.NO_SUCH_FILE, PathFault.TOO_LARGE}:
            return None if error.fault is PathFault.NO_SUCH_FILE else b""
        raise


def _entry(info: FileInfo) -> str:
    name = info.path.rpartition("/")[2]
    return name + {FileKind.FILE: "", FileKind.FOLDER: "/", FileKind.OTHER: "@"}[info.kind]


def _one_per_line(names: Sequence[str], *, nothing: str, rest: str) -> ToolOutcome:
    cut = truncate("\n".join(names) or nothing, cap_bytes=CAP_BYTES, rest=rest)
    return ToolOutcome(content=cut.text, omitted_bytes=cut.omitted_bytes)
