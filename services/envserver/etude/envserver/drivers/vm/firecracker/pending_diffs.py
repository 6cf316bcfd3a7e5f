"""Pending diffs of a VM: those that this host has requested, recorded in the VM's folder.

A compromised VMM may put any files into its jail, by any name. So requests are recorded before they
are made, and no other file is read.
"""

from dataclasses import dataclass
from pathlib import Path

from etude.common import atomic
from etude.envserver.drivers.vm.errors import VmmError

MAX_PENDING = 16
"""A diff is merged as soon as it is written; others come from a failure or a dead process."""
_NOTE = "diffs"


@dataclass(frozen=True, slots=True)
class PendingDiffs:
    """Diffs of one VM that were not merged yet."""

    folder: Path
    """Folder of the VM; private to the host."""

    def add(self) -> str:
        """Record the next diff, and return its name.

        Raises:
            VmmError: what was noted cannot be read.
        """
        asked = self._load()
        self._save(range(asked.start, asked.stop + 1))
        return _name(asked.stop)

    def pending(self) -> list[str]:
        """List the recorded diffs, oldest first."""
        return [_name(number) for number in self._load()]

    def remove_oldest(self) -> None:
        asked = self._load()
        self._save(range(asked.start + 1, asked.stop))

    def _load(self) -> range:
        try:
            first, behind = map(int, (self.folder / _NOTE).read_text().split())
        except FileNotFoundError:
            return range(0)
        except (OSError, ValueError) as cause:
            raise VmmError(f"{self.folder / _NOTE}: {cause}") from cause
        return range(first, behind)

    def _save(self, asked: range) -> None:
        atomic.write_text(self.folder / _NOTE, f"{asked.start} {asked.stop}")


def _name(number: int) -> str:
    return f"diff-{number}"
