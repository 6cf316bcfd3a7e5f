"""Tool read_lints: new diagnostics of ruff in edited Python files.

The linter runs on the host, on bytes that the policy wrote: in a jail of its own, without
configuration, environment or a way to fix.
"""

import asyncio
import functools
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NamedTuple

from typing_extensions import override

from etude.agent.jail.client import JailedProgram
from etude.agent.tools import syntax_checkers
from etude.agent.tools.base import Access, Texts, Tool, ToolError, ToolOutcome
from etude.agent.tools.truncation import truncate
from etude.agent.workspace import Workspace, relative_path
from etude.common.errors import UnavailableError

_MAX_BYTES = 1 << 20
_CAP_BYTES = 8 << 10
SUFFIXES = (".py", ".pyi")
_KEPT_BYTES = "original-bytes"
_MAX_KEPT_BYTES = 16 << 20
"""Bytes kept of files before their first edit; beyond it, read_lints shows nothing."""
_CHECK = ("check", "--isolated", "--no-cache", "--quiet", "--output-format=json")
_FORMAT = ("format", "--isolated", "--no-cache", "--quiet")


class Lint(NamedTuple):
    """One diagnostic."""

    line: int
    column: int
    code: str
    message: str
    source: str
    """Its line without indentation, which stays the same when lines move."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """Identity of the diagnostic across versions of the file."""
        return self.code, self.message, self.source


class ReadLints(Tool):
    """Show diagnostics of Python files, and syntax errors of others, that your edits brought in."""

    access: ClassVar[Access] = Access.TREE
    paths: Texts
    """Files to check, one per line."""

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        rows: list[str] = []
        for path in self.paths:
            data = await workspace.read(path)
            before = _original(workspace, path, data)
            if path.endswith(syntax_checkers.SUFFIXES):
                rows += await syntax_checkers.new_complaints(workspace, path, before, data)
            rows += [_row(path, lint) for lint in await new_lints(path, before, data)]
        cut = truncate("\n".join(rows) or "No new lints.", cap_bytes=_CAP_BYTES, rest="fix these")
        return ToolOutcome(content=cut.text, omitted_bytes=cut.omitted_bytes)


async def after_edit(workspace: Workspace, path: str, before: bytes, after: bytes) -> str:
    """Keep the original file, and return the edit's new diagnostics as text to append."""
    _keep(workspace, path, before)
    try:
        found = await new_lints(path, before, after)
    except ToolError as error:
        return f"\n({error})"
    if not found:
        return ""
    rows = "\n".join(_row(path, lint) for lint in found)
    return "\nNew lints:\n" + truncate(rows, cap_bytes=_CAP_BYTES, rest="use read_lints").text


def _keep(workspace: Workspace, path: str, before: bytes) -> None:
    """Keep the file as it was before the first edit."""
    name = _note(path)
    has_linter = path.endswith((*SUFFIXES, *syntax_checkers.SUFFIXES))
    if not has_linter or workspace.notes.get(name) is not None:
        return
    kept = int(workspace.notes.get(_KEPT_BYTES) or b"0") + len(before)
    if kept <= _MAX_KEPT_BYTES:
        workspace.notes.store(_KEPT_BYTES, b"%d" % kept)
        workspace.notes.store(name, before)


def _original(workspace: Workspace, path: str, present: bytes) -> bytes:
    """The original of a file; the present content if none was kept."""
    found = workspace.notes.get(_note(path))
    return present if found is None else found


def _note(path: str) -> str:
    return f"original-{hashlib.sha256(relative_path(path).encode()).hexdigest()[:32]}"


async def new_lints(path: str, before: bytes, after: bytes) -> list[Lint]:
    """Diagnostics of the new content that the old one did not have.

    Raises:
        ToolError: the linter does not finish with this file.
    """
    if not path.endswith(SUFFIXES) or before == after:
        return []
    found = await diagnostics(path, after)
    if not found:
        return []
    before_lints = await diagnostics(path, before)
    return syntax_checkers.new_items(found, before_lints, lambda lint: lint.identity)


async def diagnostics(path: str, data: bytes) -> list[Lint]:
    """All diagnostics of ruff's default rules for one file.

    Raises:
        ToolError: the file is too large, or the linter does not finish with it.
        UnavailableError: there is no ruff on this machine.
    """
    if len(data) > _MAX_BYTES:
        raise ToolError(f"no lints: {path} is larger than {_MAX_BYTES >> 20} MiB")
    if not data.strip():
        return []
    output = await _ruff(_CHECK, path, data)
    try:
        rows = json.loads(output)
    except ValueError as error:
        raise ToolError(f"no lints: the linter failed on {path}") from error
    lines = data.decode("utf-8", "replace").split("\n")
    return [_lint(row, lines) for row in rows]


async def format_file(path: str, data: bytes) -> bytes | None:
    """A Python file as ruff's formatter writes it; None for other files and invalid Python.

    Raises:
        ToolError: the file is too large, or the formatter does not finish with it.
        UnavailableError: there is no ruff on this machine.
    """
    if not path.endswith(SUFFIXES) or not data.strip():
        return None
    if len(data) > _MAX_BYTES:
        raise ToolError(f"{path} is larger than {_MAX_BYTES >> 20} MiB")
    return await _ruff(_FORMAT, path, data) or None


async def _ruff(command: Sequence[str], path: str, data: bytes) -> bytes:
    run = functools.partial(_jail(tuple(command)).run, f"/{relative_path(path)}", data)
    output = await asyncio.get_running_loop().run_in_executor(_executor(), run)
    if output is None:
        raise ToolError(f"no lints: ruff took too long on {path}")
    return output


@functools.cache
def _executor() -> ThreadPoolExecutor:
    """Thread of its own: there is one jail, and waiting for it must not block other work."""
    return ThreadPoolExecutor(1, thread_name_prefix="lints")


@functools.cache
def _jail(command: tuple[str, ...]) -> JailedProgram:
    """Jail of this process for a command: starting it takes as long as checking ten files."""
    return JailedProgram((_executable(), *command))


def _executable() -> str:
    beside = Path(sys.executable).parent
    found = shutil.which("ruff", path=beside) or shutil.which("ruff")
    if found is None:
        raise UnavailableError("ruff is not installed here: pip install 'etude[envserver]'")
    return found


def _lint(row: dict[str, object], lines: Sequence[str]) -> Lint:
    place = row["location"]
    line, column = (place["row"], place["column"]) if isinstance(place, dict) else (1, 1)
    source = lines[line - 1].strip() if line <= len(lines) else ""
    return Lint(line, column, str(row.get("code") or "syntax"), str(row["message"]), source)


def _row(path: str, lint: Lint) -> str:
    return f"{path}:{lint.line}:{lint.column}: {lint.code} {lint.message}"
