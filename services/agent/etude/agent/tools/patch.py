"""Tool apply_patch: changes several files by one patch."""

from typing import ClassVar, NamedTuple

from pydantic import Field
from typing_extensions import override

from etude.agent.tools import lints, search_replace
from etude.agent.tools.base import Access, Tool, ToolError, ToolOutcome
from etude.agent.tools.hunks import MismatchError, apply_hunks
from etude.agent.tools.unified_diff import FilePatch, parse_diff
from etude.agent.workspace import PathFault, Workspace, WorkspaceError, relative_path

_MAX_FILES = 100


class _Change(NamedTuple):
    """A file before and after; None if there is none."""

    before: bytes | None
    after: bytes | None


class ApplyPatch(Tool):
    """Apply a unified diff, to any number of files: all of its hunks or none."""

    access: ClassVar[Access] = Access.ALL
    patch: str = Field(min_length=1)
    """The diff, with --- a/PATH, +++ b/PATH and @@ lines; /dev/null stands for no file."""

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        patches = parse_diff(self.patch)
        changes = await _plan_changes(workspace, patches)
        await _write_changes(workspace, changes)
        rows = ["Applied the patch:", *(_row(patch) for patch in patches)]
        for path, change in changes.items():
            if change.after is not None:
                before, after = change.before or b"", change.after
                rows[-1] += await lints.after_edit(workspace, path, before, after)
        return ToolOutcome(content="\n".join(rows))


async def _plan_changes(workspace: Workspace, patches: list[FilePatch]) -> dict[str, _Change]:
    """Content of every file after the patch, in its order; nothing is written.

    Raises:
        ToolError: a hunk does not fit.
    """
    changes: dict[str, _Change] = {}
    for patch in patches:
        path = relative_path(patch.path)
        if path not in changes:
            present = await _read_existing(workspace, path)
            changes[path] = _Change(present, present)
        before, present = changes[path]
        changes[path] = _Change(before, _apply_to_file(patch, present))
    if len(changes) > _MAX_FILES:
        raise ToolError(f"the patch changes {len(changes)} files; {_MAX_FILES} are the limit")
    return {path: change for path, change in changes.items() if change.before != change.after}


async def _read_existing(workspace: Workspace, path: str) -> bytes | None:
    try:
        return await workspace.read(path)
    except WorkspaceError as error:
        if error.fault is PathFault.NO_SUCH_FILE:
            return None
        raise


def _apply_to_file(patch: FilePatch, present: bytes | None) -> bytes | None:
    if patch.is_new and present is not None:
        raise ToolError(f"{patch.path} exists already, and the patch would create it")
    if present is None and not patch.is_new:
        raise WorkspaceError(PathFault.NO_SUCH_FILE, patch.path)
    try:
        after = apply_hunks(patch, present or b"")
    except MismatchError as error:
        hint = search_replace.nearest_hint(present or b"", error.before.decode("utf-8", "replace"))
        raise ToolError(f"{error}; nothing was changed{hint}") from error
    if patch.is_deleted and after:
        raise ToolError(f"{patch.path} would be deleted, and the patch leaves something of it")
    return None if patch.is_deleted else after


async def _write_changes(workspace: Workspace, changes: dict[str, _Change]) -> None:
    """Write all changes; on an error, restore the files that were written.

    Raises:
        WorkspaceError: a file cannot be written.
    """
    done: list[str] = []
    try:
        for path, change in changes.items():
            await _write_or_delete(workspace, path, change.after)
            done.append(path)
    except WorkspaceError:
        for path in reversed(done):
            await _write_or_delete(workspace, path, changes[path].before)
        raise


async def _write_or_delete(workspace: Workspace, path: str, data: bytes | None) -> None:
    if data is None:
        await workspace.delete(path)
    else:
        await workspace.write(path, data)


def _row(patch: FilePatch) -> str:
    sign = "A" if patch.is_new else "D" if patch.is_deleted else "M"
    return f"{sign} {patch.path} (+{patch.num_added} -{patch.num_removed})"
