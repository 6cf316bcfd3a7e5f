"""Spool of feedback events: a file of JSON lines that a killed process leaves whole.

    events.jsonl   events in the order in which they were added, one a line. It is appended to, and
                   replaced by its rest once more of it is done with than waits
    state.json     bytes of events.jsonl that are done with, and counts; replaced atomically
    lock           held while either is changed, so that several processes may share a folder

An event is durable once `append` returns. A crash can only repeat what was sent: every event has an
id of its own, by which the service knows it again. Standard library alone.
"""

import contextlib
import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from etude.common import atomic

MAX_BYTES = 16 << 20
"""Size of the events that wait from which on others are refused."""
COMPACT_BYTES = 256 << 10
"""Fewer bytes that are done with may stay in the file."""
_MAX_REASONS = 64
_REASON = re.compile(r"[0-9]{0,3} ?[A-Za-z]{1,64}")


class SpoolBatch(NamedTuple):
    """Events to send next, and their place in the file."""

    lines: Sequence[bytes]
    """JSON of each event."""
    generation: int
    start: int
    end: int


class SpoolCounts(NamedTuple):
    """Counts of a spool since its folder was made."""

    waiting_bytes: int
    num_sent: int
    given_up: Mapping[str, int]
    """Events that were given up, by reason."""


@dataclass(slots=True)
class _State:
    generation: int = 0
    """Changes whenever the file is emptied or replaced: places in it mean something else then."""
    offset: int = 0
    num_sent: int = 0
    given_up: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "generation": self.generation,
                "offset": self.offset,
                "sent": self.num_sent,
                "givenUp": self.given_up,
            }
        ).encode()


@dataclass(frozen=True, slots=True)
class EventSpool:
    """Events of one folder that wait to be sent."""

    folder: Path
    max_bytes: int = MAX_BYTES

    def append(self, line: bytes) -> bool:
        """Append one event; false, and counted, if the spool is full.

        Args:
            line: JSON of the event, without a newline.

        Raises:
            OSError: the disk does not take it.
        """
        with self._lock() as (file, state):
            waiting = file.seek(0, os.SEEK_END) - state.offset
            if waiting + len(line) + 1 > self.max_bytes:
                self._count(state, {"SpoolFull": 1})
                return False
            _append(file, [line])
        return True

    def refuse(self, reason: str) -> None:
        """Count an event that is not kept."""
        with self._lock() as (_, state):
            self._count(state, {reason: 1})

    def read_batch(self, *, max_events: int, max_bytes: int) -> SpoolBatch:
        """Read the events to send next; at least one if any waits."""
        with self._lock() as (file, state):
            file.seek(state.offset)
            lines: list[bytes] = []
            size = 0
            while len(lines) < max_events and (line := file.readline()):
                if lines and size + len(line) > max_bytes:
                    break
                lines.append(line[:-1])
                size += len(line)
            return SpoolBatch(lines, state.generation, state.offset, state.offset + size)

    def commit(
        self,
        batch: SpoolBatch,
        *,
        num_sent: int,
        given_up: Mapping[str, int],
        again: Sequence[bytes] = (),
    ) -> None:
        """Note that a batch is done with.

        Args:
            batch: as it was read; nothing happens if another process was faster.
            num_sent: events that the service has.
            given_up: events that it refused for good, by reason.
            again: events that wait on, behind all others.
        """
        with self._lock() as (file, state):
            if (state.generation, state.offset) != (batch.generation, batch.start):
                return
            if again:
                _append(file, again)
            state.offset = batch.end
            state.num_sent += num_sent
            size = file.seek(0, os.SEEK_END)
            if state.offset == size:
                _empty(file, state)
            self._count(state, given_up)
            if state.offset > max(size - state.offset, COMPACT_BYTES):
                self._compact(file, state)

    def clear(self) -> int:
        """Forget all events that wait, and return their number: their user took consent back."""
        with self._lock() as (file, state):
            file.seek(state.offset)
            number = sum(1 for _ in file)
            _empty(file, state)
            self._count(state, {"Revoked": number} if number else {})
        return number

    def read_counts(self) -> SpoolCounts:
        """Read the counts."""
        with self._lock() as (file, state):
            waiting = file.seek(0, os.SEEK_END) - state.offset
            return SpoolCounts(waiting, state.num_sent, dict(state.given_up))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[tuple[BinaryIO, _State]]:
        """Open file and state, as a crash may have left them, repaired."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / "events.jsonl"
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                atomic.sync_folder(self.folder)
            with path.open("r+b") as file:
                state = _read_state(self.folder / "state.json")
                _cut_torn_line(file)
                if state.offset > file.seek(0, os.SEEK_END):
                    # Emptied, and killed before the state said so.
                    state.generation, state.offset = state.generation + 1, 0
                    self._write(state)
                yield file, state
        finally:
            os.close(lock)

    def _count(self, state: _State, given_up: Mapping[str, int]) -> None:
        for reason, number in given_up.items():
            is_known = reason in state.given_up or len(state.given_up) < _MAX_REASONS
            name = reason if is_known and _REASON.fullmatch(reason) else "Other"
            state.given_up[name] += number
        self._write(state)

    def _compact(self, file: BinaryIO, state: _State) -> None:
        """Replace the file by its rest; killed in between, what was sent is sent again."""
        file.seek(state.offset)
        rest = file.read()
        state.generation, state.offset = state.generation + 1, 0
        # First: the old offset must not point into the new file.
        self._write(state)
        atomic.write_bytes(self.folder / "events.jsonl", rest, fsync=True, mode=0o600)

    def _write(self, state: _State) -> None:
        # On the disk before the next append: an old offset must not point into newer events.
        atomic.write_bytes(self.folder / "state.json", state.to_json(), fsync=True, mode=0o600)


def _append(file: BinaryIO, lines: Sequence[bytes]) -> None:
    file.seek(0, os.SEEK_END)
    file.write(b"".join(line + b"\n" for line in lines))
    file.flush()
    os.fsync(file.fileno())


def _empty(file: BinaryIO, state: _State) -> None:
    file.truncate(0)
    state.generation, state.offset = state.generation + 1, 0


def _cut_torn_line(file: BinaryIO) -> None:
    """Cut a line whose writer was killed before `append` returned."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def _read_state(path: Path) -> _State:
    """Read the state; a damaged one is as none, and what was sent is sent again."""
    try:
        value = json.loads(path.read_bytes())
        given_up = Counter(value["givenUp"])
        state = _State(value["generation"], value["offset"], value["sent"], given_up)
        numbers = [state.generation, state.offset, state.num_sent, *given_up.values()]
        is_sound = all(type(each) is int and each >= 0 for each in numbers)
        return state if is_sound else _State()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _State()
