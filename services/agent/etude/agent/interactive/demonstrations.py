"""Changes that a user keeps a day after the policy's edits, sent as patches.

They hold text of the user's files: with a consent of their own, and not without it.
"""

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from etude.agent.interactive.edits import MachineTime, read_machine_time
from etude.agent.interactive.folder_changes import compare_folders
from etude.agent.interactive.user_files import UserFile, open_folder, read_file
from etude.common import atomic
from etude.common.errors import EtudeError
from etude.common.feedback.client import EventClient, EventContext

AGE_S = 86_400.0
"""After the last edit of a session."""
MAX_CHARS = 64 << 10
"""Of one patch: the service takes no longer text, and larger changes are not sent."""
MAX_FILE_BYTES = 1 << 20
"""Of one file before the first edit; larger ones are left out."""
MAX_SESSIONS = 500
"""Sessions that wait; of more, the oldest are forgotten."""


class EditedSession(NamedTuple):
    """A session that edits files, at its last edit."""

    folder: str
    """Absolute."""
    about: EventContext
    turn: int
    edited: MachineTime


@dataclass(frozen=True, slots=True)
class DemonstrationJournal:
    """Sessions whose files are compared a day later: a file each."""

    folder: Path

    def note_edit(self, session: EditedSession, path: str, before: bytes | None) -> None:
        """Remember a file as it was, unless an earlier edit of the session did.

        Args:
            session: as it is with this edit.
            path: of the file, relative to the user's folder.
            before: content; None if there was no file.

        Raises:
            OSError: the disk does not take it.
        """
        if before is not None and len(before) > MAX_FILE_BYTES:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self.folder / f"{session.about.rollout}.json"
        known = _read(file)
        files = {path: before, **(known[1] if known is not None else {})}
        packed = {name: _pack(data) for name, data in files.items()}
        data = json.dumps([session, packed]).encode()
        atomic.write_bytes(file, data, fsync=True, mode=0o600)
        for old in self._list_files()[:-MAX_SESSIONS]:
            old.unlink(missing_ok=True)

    def send_due(self, client: EventClient) -> int:
        """Tell of the sessions that are old enough; returns their number.

        A process that is killed here tells again under the same ids.

        Raises:
            OSError: the disk does not take events.
        """
        time_now, number = read_machine_time(), 0
        for file in self._list_files():
            found = _read(file)
            if found is not None and time_now.age_s(found[0].edited) < AGE_S:
                continue
            text = _find_change(*found) if found is not None else ""
            if found is not None and 0 < len(text) <= MAX_CHARS:
                about = found[0].about
                payload = {"turn": found[0].turn, "text": text}
                client.add("demonstration", payload, about, event_id=f"{about.rollout}-kept")
                number += 1
            file.unlink(missing_ok=True)
        return number

    def clear(self) -> None:
        """Forget all sessions."""
        for file in self._list_files():
            file.unlink(missing_ok=True)

    def _list_files(self) -> list[Path]:
        """Files of the sessions, oldest first."""
        return sorted(self.folder.glob("*.json"), key=lambda file: file.stat().st_mtime)


def _find_change(session: EditedSession, files: Mapping[str, bytes | None]) -> str:
    """Patch of what is kept of a session; empty if there is none, or none that can be sent."""
    try:
        return asyncio.run(_compare(session, files)).decode()
    except (EtudeError, OSError, UnicodeDecodeError):
        return ""  # the folder is gone, or has files that are not text


async def _compare(session: EditedSession, files: Mapping[str, bytes | None]) -> bytes:
    workspace = open_folder(Path(session.folder))
    before: dict[str, UserFile] = {}
    after: dict[str, UserFile] = {}
    for path, content in files.items():
        file = await read_file(workspace, path)
        if file is not None:
            after[path] = UserFile(file.content)
        if content is not None:
            before[path] = UserFile(content)
    return compare_folders(before, after).patch


def _pack(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _read(file: Path) -> tuple[EditedSession, dict[str, bytes | None]] | None:
    """Read a session, and its files before their first edits; None if there is no sound one."""
    try:
        (folder, about, turn, edited), packed = json.loads(file.read_bytes())
        session = EditedSession(folder, EventContext(*about), turn, MachineTime(*edited))
        session.edited.age_s(session.edited)
        files = {n: None if d is None else base64.b64decode(d) for n, d in packed.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return session, files
