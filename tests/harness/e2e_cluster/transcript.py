"""What a pass prints and keeps: each stage with its time, and what was seen in it."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OUT = Path(__file__).parents[3] / "bench" / "out"


class Transcript:
    """Lines with the seconds since the beginning, on the screen and in a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._begun_s = time.monotonic()
        self._stages: list[tuple[str, float]] = []

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """A stage from its title to the time that it took."""
        begun_s = time.monotonic()
        self.say(f"== {title}")
        yield
        took_s = time.monotonic() - begun_s
        self._stages.append((title, took_s))
        self.say(f"   done in {took_s:.1f} s")

    def say(self, line: str) -> None:
        """One line with its time."""
        self._write(f"{time.monotonic() - self._begun_s:7.1f}  {line}")

    def show(self, words: str, output: str) -> None:
        """A command and what it answered, as it would look in a terminal."""
        self.say(f"   $ {words}")
        for line in output.rstrip().splitlines():
            self._write(f"             {line}")

    def table(self) -> None:
        """The time of each stage, and of all."""
        self._write("")
        for title, took_s in self._stages:
            self._write(f"{took_s:7.1f} s  {title}")
        self._write(f"{time.monotonic() - self._begun_s:7.1f} s  in all")

    def _write(self, line: str) -> None:
        for each in (sys.stdout, self._file):
            each.write(line + "\n")
            each.flush()
