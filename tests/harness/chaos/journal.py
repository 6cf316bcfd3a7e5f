"""What processes write down as they go: lines that survive a SIGKILL of their writer."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(slots=True)
class Journal:
    """Appends to one file; each line is one write, with the machine's monotonic time."""

    path: Path
    _file: int = -1

    def write(self, kind: str, **fields: object) -> None:
        """Append one line."""
        if self._file < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        line = json.dumps({"t": time.monotonic(), "kind": kind, **fields})
        os.write(self._file, line.encode() + b"\n")


def read(path: Path) -> Iterator[Line]:
    """The lines of a journal, or of all journals in a folder by name, each with its writer.

    A journal that nobody has begun has none.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    for file in filter(Path.exists, files):
        for line in file.read_text().splitlines():
            yield {"who": file.stem, **json.loads(line)}
