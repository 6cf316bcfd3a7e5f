"""Tools of the Compact toolset: results of a few tokens, for very small policies."""

from typing import ClassVar

from typing_extensions import override

from etude.agent.patterns import GrepQuery, is_hidden
from etude.agent.tools import search_replace
from etude.agent.tools.base import Access, ErrorKind, Tool, ToolError, ToolOutcome
from etude.agent.tools.terminal import Command, command_outcome, stop_status
from etude.agent.tools.truncation import truncate
from etude.agent.workspace import FileKind, PathFault, Workspace, WorkspaceError

CAP_BYTES = 1 << 10
_TIMEOUT_S = 30
_MAX_MATCHES = 3


class CompactTool(Tool):
    """A tool whose errors say nothing but what went wrong."""

    async def act(self, workspace: Workspace) -> ToolOutcome:
        """Run the call; `run` shortens its errors."""
        raise NotImplementedError

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        try:
            return await self.act(workspace)
        except WorkspaceError as error:
            full = error.fault is PathFault.NO_SPACE
            raise ToolError("no space left" if full else "no such file") from error


class ReadFile(CompactTool):
    """Read a file."""

    access: ClassVar[Access] = Access.READ
    path: str
    """File."""

    @property
    @override
    def target(self) -> str:
        return self.path

    @override
    async def act(self, workspace: Workspace) -> ToolOutcome:
        data = await workspace.read(self.path)
        return _truncated_outcome(data.decode("utf-8", "replace"))


class SearchReplace(CompactTool):
    """Replace text that stands in one place of a file."""

    access: ClassVar[Access] = Access.WRITE
    path: str
    """File."""
    old_string: str
    """What to replace."""
    new_string: str
    """What to put there."""

    @property
    @override
    def target(self) -> str:
        return self.path

    @override
    async def act(self, workspace: Workspace) -> ToolOutcome:
        data = await workspace.read(self.path)
        try:
            edited = search_replace.replace(data, self.old_string, self.new_string)
        except search_replace.NoMatchError as error:
            raise ToolError("old_string not found") from error
        except search_replace.AmbiguousError as error:
            raise ToolError("old_string not unique") from error
        await workspace.write(self.path, edited.data)
        return ToolOutcome(content="ok")


class ListDir(CompactTool):
    """List the Python files below a folder, tests left out."""

    access: ClassVar[Access] = Access.TREE
    path: str
    """Folder."""

    @override
    async def act(self, workspace: Workspace) -> ToolOutcome:
        folder = await workspace.stat(self.path)
        if folder.kind is not FileKind.FOLDER:
            raise WorkspaceError(PathFault.NOT_A_FOLDER, self.path)
        inside = folder.path and folder.path + "/"
        paths = await workspace.glob("**/*.py")
        return _truncated_outcome(
            "\n".join(p for p in paths if p.startswith(inside) and _is_shown(p))
        )


class Grep(CompactTool):
    """Find lines that hold a text, tests left out."""

    access: ClassVar[Access] = Access.TREE
    pattern: str
    """Text."""

    @override
    async def act(self, workspace: Workspace) -> ToolOutcome:
        found = await workspace.grep(GrepQuery(pattern=self.pattern, is_literal=True))
        rows = [
            f"{file.path}: {line.text.strip()}"
            for file in found
            if _is_shown(file.path)
            for line in file.lines
        ]
        return _truncated_outcome("\n".join(rows[:_MAX_MATCHES]) or "no match")


class RunTerminal(CompactTool):
    """Run a shell command."""

    access: ClassVar[Access] = Access.ALL
    command: Command
    """Command line."""

    @override
    async def act(self, workspace: Workspace) -> ToolOutcome:
        done = await workspace.exec(self.command, timeout_s=_TIMEOUT_S)
        if done.timed_out:
            raise ToolError("timed out", ErrorKind.TIMEOUT)
        return command_outcome(done, cap_bytes=CAP_BYTES, status=stop_status(done))


def _is_shown(path: str) -> bool:
    return not is_hidden(path) and "tests" not in path.split("/")[:-1]


def _truncated_outcome(text: str) -> ToolOutcome:
    cut = truncate(text.rstrip("\n"), cap_bytes=CAP_BYTES, rest="too long")
    return ToolOutcome(content=cut.text, omitted_bytes=cut.omitted_bytes)
