"""Edits of the policy in files of a user, looked at again later: by hashes of their lines."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from etude.common import atomic
from etude.common.feedback.client import EventClient, EventContext, count_alive_lines

HORIZONS_S = (300.0, 3_600.0, 86_400.0, 7 * 86_400.0)
"""Ages at which an edit is looked at, or at the next start after them."""
MAX_EDITS = 5_000
"""Edits that are remembered; the oldest are no longer looked at, which censors them."""
_MAX_FILE_BYTES = 8 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MachineTime(NamedTuple):
    """Time that no change of the clock moves, as long as the machine runs."""

    boot_id: str
    since_boot_s: float
    wall_s: float

    def age_s(self, earlier: "MachineTime") -> float:
        """Seconds since an earlier time; by the wall clock if the machine was started since."""
        if self.boot_id and self.boot_id == earlier.boot_id:
            return max(0.0, self.since_boot_s - earlier.since_boot_s)
        return max(0.0, self.wall_s - earlier.wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedEdit:
    """One edit that was made."""

    edit: str
    path: str
    """Absolute."""
    line_hashes: tuple[str, ...]
    made: MachineTime
    about: EventContext
    num_looks: int = 0
    """Horizons that are over and were looked at."""


@dataclass(frozen=True, slots=True)
class EditJournal:
    """The edits that are looked at again: a file each, so that several agents may add some."""

    folder: Path

    def add(self, edit: AppliedEdit) -> None:
        """Remember an edit.

        Raises:
            OSError: the disk does not take it.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_edit(self.folder / f"{round(edit.made.wall_s * 1000):014d}-{edit.edit}.json", edit)

    def list_files(self) -> list[Path]:
        """Files of the edits, oldest first."""
        return sorted(self.folder.glob("*.json"))

    def clear(self) -> None:
        """Forget all edits."""
        for file in self.list_files():
            file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Keep other agents from looking at the same time; false if one does."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(lock)


def tell_applied_edit(
    journal: EditJournal, client: EventClient, edit: AppliedEdit, turn: int
) -> None:
    """Remember an edit that a turn of the policy made, and tell of it.

    Raises:
        OSError: the disk does not take it.
    """
    journal.add(edit)
    hashes = edit.line_hashes
    payload = {"turn": turn, "edit": edit.edit, "numLines": len(hashes), "lineHashes": hashes}
    client.add("edit_applied", payload, edit.about, event_id=f"{edit.edit}-applied")


def observe_edits(
    journal: EditJournal,
    client: EventClient,
    secret: bytes,
    *,
    read_time: Callable[[], MachineTime] | None = None,
) -> int:
    """Look at the files of edits whose next horizon is over; returns the number of looks.

    One look stands for all horizons up to the age at which it is made. An edit is forgotten after
    its last one, and so is a damaged one. A process that is killed here looks again under the same
    ids, of which the service keeps the first.

    Raises:
        OSError: the disk does not take events.
    """
    time_now = (read_time or read_machine_time)()
    num_looks = 0
    with journal.lock() as is_held:
        files = journal.list_files() if is_held else []
        for file in files[:-MAX_EDITS]:
            file.unlink(missing_ok=True)
        for file in files[-MAX_EDITS:]:
            edit = _read_edit(file)
            if edit is None:
                file.unlink(missing_ok=True)
                continue
            age_s = time_now.age_s(edit.made)
            if age_s < HORIZONS_S[edit.num_looks]:
                continue
            num_horizons = sum(age_s >= horizon_s for horizon_s in HORIZONS_S)
            _tell_look(client, secret, edit, age_s, event_id=f"{edit.edit}-look-{num_horizons}")
            num_looks += 1
            if num_horizons < len(HORIZONS_S):
                _write_edit(file, replace(edit, num_looks=num_horizons))
            else:
                file.unlink(missing_ok=True)
    return num_looks


def _tell_look(
    client: EventClient, secret: bytes, edit: AppliedEdit, age_s: float, *, event_id: str
) -> None:
    """Tell of one look at the file of an edit."""
    text = _read_text(Path(edit.path))
    payload: dict[str, object] = {
        "edit": edit.edit,
        "ageS": round(age_s, 3),
        "isFileSeen": text is not None,
    }
    if text is not None:
        payload["numAliveLines"] = count_alive_lines(secret, edit.line_hashes, text)
    client.add("edit_observed", payload, edit.about, event_id=event_id)


def read_machine_time() -> MachineTime:
    """Read the clocks of this machine."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        boot_id = ""
    return MachineTime(boot_id, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


def _read_text(path: Path) -> str | None:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES or not path.is_file():
            return None
        return path.read_text("utf-8", "replace")
    except OSError:
        return None


def _write_edit(file: Path, edit: AppliedEdit) -> None:
    atomic.write_bytes(file, json.dumps(asdict(edit)).encode(), fsync=True, mode=0o600)


def _read_edit(file: Path) -> AppliedEdit | None:
    """Read an edit; None if its file is damaged."""
    try:
        values = json.loads(file.read_bytes())
        hashes, made, about = (values.pop(name) for name in ("line_hashes", "made", "about"))
        edit = AppliedEdit(
            **values, line_hashes=(*hashes,), made=MachineTime(*made), about=EventContext(*about)
        )
        edit.made.age_s(edit.made)
        is_sound = 0 <= edit.num_looks < len(HORIZONS_S) and all(
            isinstance(each, str) for each in (edit.edit, edit.path, *edit.line_hashes, *edit.about)
        )
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    return edit if is_sound else None
