"""Patches of the policy that wait for their user's decision."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.agent.interactive.consent import AgentState
from etude.agent.interactive.demonstrations import EditedSession
from etude.agent.interactive.edits import AppliedEdit, read_machine_time, tell_applied_edit
from etude.agent.interactive.folder_changes import FileChange
from etude.agent.interactive.user_files import UserFile, open_folder, read_file
from etude.agent.interactive.user_workspace import make_edit
from etude.agent.workspace import FolderWorkspace, WorkspaceError
from etude.common import atomic
from etude.common.errors import Problem, UserError
from etude.common.feedback.client import EventClient, EventContext, hash_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPatch:
    """Changes of one piece of work."""

    instruction: str
    folder: str
    """Absolute."""
    about: EventContext
    turn: int
    """Number of the policy's last turn."""
    files: tuple[FileChange, ...]

    @property
    def name(self) -> str:
        """The rollout's."""
        return self.about.rollout

    @property
    def short_name(self) -> str:
        """Letters of the name for people."""
        return self.name[:8]


@dataclass(frozen=True, slots=True)
class PatchStore:
    """The patches of one user, in the folder of the agent."""

    home: AgentState

    @property
    def folder(self) -> Path:
        """Folder of the patches."""
        return self.home.folder / "patches"

    def text_file(self, patch: StoredPatch) -> Path:
        """File of a patch, as `git apply` takes it."""
        return self.folder / f"{patch.name}.patch"

    def add(self, patch: StoredPatch, text: bytes) -> None:
        """Store a patch; it outlives this process once this returns."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic.write_bytes(self.text_file(patch), text, fsync=True, mode=0o600)
        data = json.dumps(_to_values(patch)).encode()
        atomic.write_bytes(self._record(patch), data, fsync=True, mode=0o600)

    def list_patches(self) -> list[StoredPatch]:
        """Patches that wait, oldest first."""
        files = sorted(self.folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        return [_read(file) for file in files]

    def find(self, name: str) -> StoredPatch:
        """The patch whose name begins so.

        Raises:
            UserError: there is none, or more than one.
        """
        found = [each for each in self.list_patches() if name and each.name.startswith(name)]
        if len(found) != 1:
            what = f"{len(found)} patches begin so" if found else "no patch waits by this name"
            fix = "etude agent patches lists those that wait"
            raise UserError(Problem("NotFound", what, name or "PATCH", fix))
        return found[0]

    async def accept(self, patch: StoredPatch, client: EventClient | None) -> None:
        """Change the user's folder as the patch says, and tell of it.

        After a kill in the middle, the same again ends it: the files that are changed already
        count as such, and events have the same ids.

        Raises:
            UserError: a file of the folder was changed since the work began.
        """
        workspace = open_folder(Path(patch.folder))
        moved = [each.path for each in patch.files if await _is_moved(workspace, each)]
        if moved:
            what = f"changed since the work began: {', '.join(sorted(moved)[:20])}"
            fix = f"undo that, or merge by hand: git apply --3way {self.text_file(patch)}"
            raise UserError(Problem("Conflict", what, patch.folder, fix))
        if client is not None:
            self._note_demonstration(patch)
        for each in patch.files:
            await _apply(workspace, each)
        if client is not None:
            self._tell(client, patch, "accepted")
            for number, each in enumerate(patch.files):
                self._tell_edit(client, patch, number, each)
            self._close(client, patch, "Merged")
        self._remove(patch)

    def reject(self, patch: StoredPatch, client: EventClient | None) -> None:
        """Forget a patch, and tell of it."""
        if client is not None:
            self._tell(client, patch, "rejected")
            self._close(client, patch, "Abandoned")
        self._remove(patch)

    def _note_demonstration(self, patch: StoredPatch) -> None:
        stored = self.home.read_consent()
        if stored is None or not stored.demonstrations:
            return
        session = EditedSession(patch.folder, patch.about, patch.turn, read_machine_time())
        for each in patch.files:
            before = None if each.before is None else each.before.content
            self.home.demonstrations.note_edit(session, each.path, before)

    def _tell(self, client: EventClient, patch: StoredPatch, kind: str) -> None:
        client.add(kind, {"turn": patch.turn}, patch.about, event_id=f"{patch.name}-{kind}")

    def _tell_edit(
        self, client: EventClient, patch: StoredPatch, number: int, change: FileChange
    ) -> None:
        if change.after is None:
            return
        before = change.before and change.before.content
        edit = make_edit(change.path, before, change.after.content)
        applied = AppliedEdit(
            edit=f"{patch.name}-{number}",
            path=str(Path(patch.folder) / change.path),
            line_hashes=tuple(hash_lines(self.home.read_secret(), edit.new_lines)),
            made=read_machine_time(),
            about=patch.about,
        )
        tell_applied_edit(self.home.journal, client, applied, patch.turn)

    def _close(self, client: EventClient, patch: StoredPatch, outcome: str) -> None:
        name = f"{patch.name}-closed"
        client.add("task_closed", {"outcome": outcome}, patch.about, event_id=name)

    def _record(self, patch: StoredPatch) -> Path:
        return self.folder / f"{patch.name}.json"

    def _remove(self, patch: StoredPatch) -> None:
        self._record(patch).unlink(missing_ok=True)
        self.text_file(patch).unlink(missing_ok=True)


async def _is_moved(workspace: FolderWorkspace, change: FileChange) -> bool:
    """True if the user's file is neither as it was nor as it will be."""
    try:
        return await read_file(workspace, change.path) not in {change.before, change.after}
    except WorkspaceError:
        return True


async def _apply(workspace: FolderWorkspace, change: FileChange) -> None:
    if change.after is None:
        if await read_file(workspace, change.path) is not None:
            await workspace.delete(change.path)
        return
    await workspace.write(change.path, change.after.content)
    if change.before is None or change.before.is_executable != change.after.is_executable:
        path = workspace.root / change.path
        bits = 0o111 if change.after.is_executable else 0
        path.chmod(path.stat().st_mode & 0o666 | bits)


def _to_values(patch: StoredPatch) -> dict[str, Any]:
    return {
        "instruction": patch.instruction,
        "folder": patch.folder,
        "about": patch.about,
        "turn": patch.turn,
        "files": [(each.path, _pack(each.before), _pack(each.after)) for each in patch.files],
    }


def _pack(file: UserFile | None) -> tuple[str, bool] | None:
    return file and (base64.b64encode(file.content).decode(), file.is_executable)


def _read(file: Path) -> StoredPatch:
    """Read a patch.

    Raises:
        UserError: the file is damaged.
    """
    try:
        values = json.loads(file.read_bytes())
        about, files = EventContext(*values.pop("about")), values.pop("files")
        changes = tuple(FileChange(path, _unpack(old), _unpack(new)) for path, old, new in files)
        return StoredPatch(**values, about=about, files=changes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        fix = "remove it, and do the work again"
        raise UserError(Problem("Corrupt", "is no patch", str(file), fix)) from error


def _unpack(values: Any) -> UserFile | None:  # noqa: ANN401 - of JSON
    return None if values is None else UserFile(base64.b64decode(values[0]), values[1])
