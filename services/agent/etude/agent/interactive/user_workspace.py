"""A user's folder as a workspace: edits are shown as diffs, and asked for, before they are made."""

import asyncio
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from typing_extensions import override

from etude.agent.interactive.commands import CommandRunner
from etude.agent.search.codebase import Codebase
from etude.agent.tools.base import ToolError
from etude.agent.workspace import (
    ExecResult,
    FolderWorkspace,
    PathFault,
    WorkspaceError,
    relative_path,
)

REJECTED_COMMAND = "the user rejected this command"
REJECTED_EDIT = "the user rejected this edit"
"""Results of calls that did not run."""
MAX_DIFF_LINES = 20_000
"""Lines of a file, before and after, up to which a diff is made."""


class Decision(StrEnum):
    """Decision about one edit or command."""

    ACCEPTED = "Accepted"
    REJECTED = "Rejected"
    NOT_ASKED = "NotAsked"
    """The user lets everything of its kind happen."""


class Edit(NamedTuple):
    """One change of a file."""

    path: str
    """Relative to the folder."""
    diff: Sequence[str]
    """Lines of the unified diff; empty for files that are not text, or too long."""
    new_lines: Sequence[str]
    """Lines that it adds."""
    is_deletion: bool
    before: bytes | None
    """Content of the file; None if there was none."""


class Approver(Protocol):
    """Asks the user."""

    async def decide_edit(self, edit: Edit) -> Decision: ...
    async def decide_command(self, command: str) -> Decision: ...


class DecisionListener(Protocol):
    """Is told of each decision: of an edit once it is made or rejected."""

    def note_edit(self, edit: Edit, decision: Decision) -> None: ...
    def note_command(self, decision: Decision) -> None: ...


class RejectedEditError(WorkspaceError):
    """The user does not want an edit."""

    def __init__(self, path: str) -> None:
        super().__init__(PathFault.DENIED, path)
        self.args = (f"{path}: {REJECTED_EDIT}",)


@dataclass(slots=True)
class UserWorkspace(FolderWorkspace):
    """A folder of a user."""

    approver: Approver = field(kw_only=True)
    listener: DecisionListener = field(kw_only=True)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _made: dict[str, tuple[bytes | None, bytes | None]] = field(default_factory=dict)
    """Contents before and after edits that were made."""
    _was_rejected: bool = False
    """True after a rejection: a patch of several files goes back to what was before it."""

    @override
    async def write(self, path: str, data: bytes) -> None:
        await self._change(path, data)

    @override
    async def delete(self, path: str) -> None:
        await self._change(path, None)

    @override
    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        async with self._asking:
            decision = await self.approver.decide_command(command)
            self.listener.note_command(decision)
        if decision is Decision.REJECTED:
            raise ToolError(REJECTED_COMMAND)
        return await FolderWorkspace.exec(self, command, timeout_s=timeout_s)

    async def _change(self, path: str, data: bytes | None) -> None:
        clean = relative_path(path)
        before = await self._read_present(path)
        # What the user wrote since is not undone without a question.
        if self._was_rejected and self._made.pop(clean, None) == (data, before):
            await self._apply(path, data)
            return
        edit = make_edit(clean, before, data)
        async with self._asking:
            decision = await self.approver.decide_edit(edit)
            self._was_rejected = decision is Decision.REJECTED
            if self._was_rejected:
                self.listener.note_edit(edit, decision)
                raise RejectedEditError(clean)
            await self._apply(path, data)
            self._made[clean] = before, data
            self.listener.note_edit(edit, decision)

    async def _read_present(self, path: str) -> bytes | None:
        try:
            return await self.read(path)
        except WorkspaceError as error:
            if error.fault is PathFault.NO_SUCH_FILE:
                return None
            if error.fault is PathFault.TOO_LARGE:
                return b""
            raise

    async def _apply(self, path: str, data: bytes | None) -> None:
        if data is None:
            await FolderWorkspace.delete(self, path)
        else:
            await FolderWorkspace.write(self, path, data)


def open_user_workspace(
    folder: Path,
    approver: Approver,
    listener: DecisionListener,
    *,
    codebase: Codebase | None = None,
) -> UserWorkspace:
    """Open a folder of the user of this process; without a codebase this process searches it."""
    runner = CommandRunner(folder, os.environ)
    codebase = codebase or Codebase()
    return UserWorkspace(folder, runner.run, codebase, approver=approver, listener=listener)


def make_edit(path: str, before: bytes | None, after: bytes | None) -> Edit:
    """Describe a change of a file; None stands for no file."""
    old, new = _text_lines(before), _text_lines(after)
    is_deletion = after is None
    if old is None or new is None or max(len(old), len(new)) > MAX_DIFF_LINES:
        return Edit(path, (), (), is_deletion, before)
    names = ("/dev/null" if before is None else path, "/dev/null" if is_deletion else path)
    diff = list(difflib.unified_diff(old, new, *names, lineterm=""))
    added = [line[1:] for line in diff[2:] if line.startswith("+")]
    return Edit(path, diff, added, is_deletion, before)


def _text_lines(data: bytes | None) -> list[str] | None:
    if data is None:
        return []
    try:
        return data.decode().splitlines()
    except UnicodeDecodeError:
        return None
