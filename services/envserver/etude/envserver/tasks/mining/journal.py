"""Journal of a mining: outcomes of the mutations that were tried, by which a later call goes on."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from etude.common.errors import Problem, UserError

NAME = "mining.jsonl"


class JournalLine(BaseModel):
    """One line: the settings first, then the tests that count, then one line for each mutation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: Mapping[str, str] | None = None
    stable_tests: tuple[str, ...] | None = None
    suite_s: float = 0.0
    mutation: str = ""
    task_id: str = ""
    reason: str = ""
    """Reason for which a mutation became no task."""


@dataclass(slots=True)
class MiningJournal:
    """The journal in a folder of tasks; lines are appended and synced."""

    folder: Path
    stable_tests: tuple[str, ...] = ()
    """Tests that pass each time; empty until they are known."""
    suite_s: float = 0.0
    outcomes: dict[str, JournalLine] = field(default_factory=dict)
    """Line of each mutation that was tried."""

    @property
    def num_tasks(self) -> int:
        return sum(bool(line.task_id) for line in self.outcomes.values())

    def append(self, line: JournalLine) -> None:
        """Append a line, on the disk when this returns."""
        with (self.folder / NAME).open("ab") as file:
            file.write(line.model_dump_json(exclude_defaults=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def _take(self, line: JournalLine) -> None:
        if line.stable_tests is not None:
            self.stable_tests, self.suite_s = line.stable_tests, line.suite_s
        if line.mutation:
            self.outcomes[line.mutation] = line


@contextlib.contextmanager
def open_journal(folder: Path, settings: Mapping[str, str]) -> Iterator[MiningJournal]:
    """Open the journal of a folder, or begin one; the folder is locked until the block ends.

    Raises:
        UserError: another process mines into the folder, the journal has other
            settings, or a line of it is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor, folder)
        yield _read_journal(folder, settings)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as cause:
        what, fix = "is in use by another call", "wait for its end, or name another folder"
        raise UserError(Problem("Conflict", what, str(folder), fix)) from cause


def _read_journal(folder: Path, settings: Mapping[str, str]) -> MiningJournal:
    path = folder / NAME
    found = MiningJournal(folder)
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        # The last line was cut off by a crash; what it would have said is done once more.
        with path.open("rb+") as file:
            file.truncate(len(whole))
    lines = [_parse(line, path) for line in whole.splitlines()]
    if not lines:
        found.append(JournalLine(settings=settings))
        return found
    before = lines[0].settings or {}
    for name in settings:
        if before.get(name) != settings[name]:
            what = f"was begun with another {name}"
            fix = "name a new folder with --out, or repeat the command that began this one"
            raise UserError(Problem("Conflict", what, str(path), fix))
    for line in lines[1:]:
        found._take(line)
    return found


def _parse(text: bytes, path: Path) -> JournalLine:
    try:
        return JournalLine.model_validate(json.loads(text))
    except (ValueError, ValidationError) as cause:
        fix = "name a new folder with --out"
        raise UserError(Problem("Corrupt", "holds a damaged line", str(path), fix)) from cause
