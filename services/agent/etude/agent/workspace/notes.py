"""Notes of tools about one environment, outside its files, diffs and commands."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from etude.common import atomic

FOLDER = "notes"
"""Their folder in a driver's state of an environment."""
_NAME = re.compile(r"[a-z][a-z0-9-]{0,63}")


class Notes(Protocol):
    """A few small values by name."""

    def get(self, name: str) -> bytes | None:
        """The value, None if there is none."""
        ...

    def store(self, name: str, value: bytes) -> None:
        """Store a value atomically."""
        ...


@dataclass(slots=True)
class MemoryNotes(Notes):
    """Notes in memory."""

    _values: dict[str, bytes] = field(default_factory=dict)

    @override
    def get(self, name: str) -> bytes | None:
        return self._values.get(name)

    @override
    def store(self, name: str, value: bytes) -> None:
        self._values[name] = value


@dataclass(frozen=True, slots=True)
class FolderNotes(Notes):
    """Notes as files in a folder that commands cannot reach; they outlive the process."""

    folder: Path

    @override
    def get(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            return None

    @override
    def store(self, name: str, value: bytes) -> None:
        path = self._path(name)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        atomic.write_bytes(path, value, mode=0o600)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid name of a note")
        return self.folder / name
