"""Run record: one row of metrics per event, and rollouts that people can read."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

from typing_extensions import override

from etude.common import atomic
from etude.common.blobs import ExistsError, MissingError, Store

METRICS = "metrics.jsonl"
SEGMENTS = "metrics/"

Row = Mapping[str, Any]


class RunRecord(Protocol):
    """Rows and rollouts that a run writes; methods are safe to call from threads."""

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows at the end. A repeated step adds a second row: readers take the later one."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row in the order written; a torn last line is left out."""
        ...

    def write_rollouts(self, step: int, split: str, rollouts: Iterable[Row]) -> None:
        """Write the rollouts of one step, whole: train, or eval-<name>."""

    def rollouts(self, step: int, split: str) -> Iterator[dict[str, Any]]:
        """The rollouts of one step; none if nothing was written."""
        ...

    def splits(self) -> list[tuple[int, str]]:
        """Every (step, split) with rollouts, ascending."""
        ...


@dataclass(slots=True)
class FolderRecord(RunRecord):
    """A folder: metrics.jsonl grows by appends, so that it can be followed with tail."""

    folder: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @override
    def append(self, rows: Sequence[Row]) -> None:
        path = self.folder / METRICS
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                # A killed writer may have left half a line: ours must not continue it.
                if file.tell() and not _ends_line(path):
                    file.write(b"\n")
                file.write(_lines(rows))

    @override
    def rows(self) -> Iterator[dict[str, Any]]:
        path = self.folder / METRICS
        if path.exists():
            yield from _parsed(path.read_bytes())

    @override
    def write_rollouts(self, step: int, split: str, rollouts: Iterable[Row]) -> None:
        path = self.folder / rollouts_key(step, split)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(path, _lines(rollouts))

    @override
    def rollouts(self, step: int, split: str) -> Iterator[dict[str, Any]]:
        path = self.folder / rollouts_key(step, split)
        if path.exists():
            yield from _parsed(path.read_bytes())

    @override
    def splits(self) -> list[tuple[int, str]]:
        found = (self.folder / "rollouts").glob("*/*.jsonl")
        return sorted((int(path.parent.name), path.stem) for path in found)


@dataclass(slots=True)
class StoreRecord(RunRecord):
    """An object store, which cannot append: each append is one create-only segment."""

    store: Store
    _next: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @override
    def append(self, rows: Sequence[Row]) -> None:
        with self._lock:
            if self._next < 0:
                self._next = sum(1 for _ in self.store.list(SEGMENTS))
            while True:
                try:
                    self.store.create(f"{SEGMENTS}{self._next:012d}.jsonl", _lines(rows))
                except ExistsError:  # written by the controller before this one
                    self._next += 1
                else:
                    self._next += 1
                    return

    @override
    def rows(self) -> Iterator[dict[str, Any]]:
        for info in self.store.list(SEGMENTS):
            yield from _parsed(self.store.get(info.key))

    @override
    def write_rollouts(self, step: int, split: str, rollouts: Iterable[Row]) -> None:
        self.store.put(rollouts_key(step, split), _lines(rollouts))

    @override
    def rollouts(self, step: int, split: str) -> Iterator[dict[str, Any]]:
        try:
            data = self.store.get(rollouts_key(step, split))
        except MissingError:
            return
        yield from _parsed(data)

    @override
    def splits(self) -> list[tuple[int, str]]:
        keys = [Path(info.key) for info in self.store.list("rollouts/")]
        return sorted((int(key.parent.name), key.stem) for key in keys)


def open_record(store: Store) -> RunRecord:
    """The record of the run whose prefix the store is opened at."""
    parts = urlparse(store.url)
    if parts.scheme == "file":
        return FolderRecord(Path(unquote(parts.path)))
    return StoreRecord(store)


def rollouts_key(step: int, split: str) -> str:
    """Key of the rollouts of one step."""
    return f"rollouts/{step:06d}/{split}.jsonl"


def latest_rows(rows: Iterable[Row]) -> list[Row]:
    """Rows without those that a later one replaces: a step or evaluation done again on resume."""
    kept: dict[tuple[object, ...], Row] = {}
    for place, row in enumerate(rows):
        kind = row.get("kind")
        if kind in {"step", "eval"}:
            key = (kind, row.get("phase"), row.get("step"), row.get("name"))
            kept.pop(key, None)
            kept[key] = row
        else:
            kept[kind, place] = row
    return list(kept.values())


def _lines(rows: Iterable[Row]) -> bytes:
    text = [json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows]
    return "".join(line + "\n" for line in text).encode()


def _parsed(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:  # torn by a kill, or the empty end of the file
            continue
        if isinstance(row, dict):
            yield row


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
