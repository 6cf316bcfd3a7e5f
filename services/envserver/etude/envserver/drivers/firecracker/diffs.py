"""Which diffs a machine was told to write: the node's own word, in the machine's folder.

A monitor that was taken over may put any number of files into its jail, by any name. So the node
notes what it asks for before it asks, and looks at nothing else.
"""

from dataclasses import dataclass
from pathlib import Path

from etude.envserver.drivers.machines.errors import VmmError

MAX_PENDING = 16
"""One is put together as soon as it is written; others are of a failure or a process that died."""
_NOTE = "diffs"


@dataclass(frozen=True, slots=True)
class Diffs:
    """Those of one machine that were not put together yet."""

    folder: Path
    """Of the machine; private to the node."""

    def ask(self) -> str:
        """A name for the next.

        Raises:
            VmmError: what was noted cannot be read.
            OSError: it cannot be noted.
        """
        asked = self._asked()
        self._note(range(asked.start, asked.stop + 1))
        return _name(asked.stop)

    def pending(self) -> list[str]:
        """All that were asked for, oldest first.

        Raises:
            VmmError: what was noted cannot be read.
        """
        return [_name(number) for number in self._asked()]

    def done(self) -> None:
        """Note that the oldest is not needed any more."""
        asked = self._asked()
        self._note(range(asked.start + 1, asked.stop))

    def _asked(self) -> range:
        try:
            first, behind = map(int, (self.folder / _NOTE).read_text().split())
        except FileNotFoundError:
            return range(0)
        except (OSError, ValueError) as cause:
            raise VmmError(f"{self.folder / _NOTE}: {cause}") from cause
        return range(first, behind)

    def _note(self, asked: range) -> None:
        partial = self.folder / f"{_NOTE}.partial"
        partial.write_text(f"{asked.start} {asked.stop}")
        partial.rename(self.folder / _NOTE)


def _name(number: int) -> str:
    return f"diff-{number}"
