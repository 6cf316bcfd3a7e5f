"""Download of one file in parts to a scratch folder, which goes on after a kill."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from etude.common.errors import CorruptError
from etude.common.model_sources.files import ModelFile, RemoteModel

PART_BYTES = 32 << 20
PARTS_AT_ONCE = 8
"""One connection to a content network gave a tenth of what a node's network takes."""


@dataclass(slots=True, kw_only=True)
class PartialFile:
    """A file that is being downloaded, with a journal of the parts that are there.

    The journal has a line per part: its index and BLAKE3. What a line promises is hashed again on
    the next start, so neither a torn line nor a part that never reached the disk is believed.
    """

    model: RemoteModel
    file: ModelFile
    folder: Path
    part_bytes: int = PART_BYTES

    @property
    def path(self) -> Path:
        return self.folder / f"{self.file.name}.part"

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.file.name}.parts"

    def download(self, report: Callable[[int], None]) -> str:
        """Fetch the parts that are missing; the SHA-256 of the whole file, which is at `path`.

        Args:
            report: called with the bytes of each part that is there, from several threads.

        Raises:
            CorruptError: the content has another digest than the source promised; it is deleted.
            UserError: the source refuses.
            UnavailableError: the source gave no answer.
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab"):  # creates it, and keeps what is there
            pass
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            os.ftruncate(descriptor, self.file.size)
            self._fill(descriptor, report)
        finally:
            os.close(descriptor)
        sha256, problem = check_digest(self.file, _read_chunks(self.path))
        if problem:
            self.discard()
            raise CorruptError(f"{self.model.uri}: {problem}")
        return sha256

    def discard(self) -> None:
        """Delete the file and its journal."""
        self.journal.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _fill(self, descriptor: int, report: Callable[[int], None]) -> None:
        present = self._verified_parts(descriptor)
        for index in present:
            report(self._length(index))
        lock = threading.Lock()

        def fetch(index: int) -> None:
            data = self.model.read(self.file, index * self.part_bytes, self._length(index))
            os.pwrite(descriptor, data, index * self.part_bytes)
            line = json.dumps([index, blake3(data).hexdigest()]) + "\n"
            with lock, self.journal.open("a") as journal:
                journal.write(line)
            report(len(data))

        missing = [index for index in range(self._num_parts) if index not in present]
        with ThreadPoolExecutor(PARTS_AT_ONCE, "model-part") as pool:
            try:
                for _ in pool.map(fetch, missing):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    @property
    def _num_parts(self) -> int:
        return -(-self.file.size // self.part_bytes)

    def _length(self, index: int) -> int:
        return min(self.part_bytes, self.file.size - index * self.part_bytes)

    def _verified_parts(self, descriptor: int) -> set[int]:
        """Indices of the parts on disk that have the journal's digest."""
        try:
            lines = self.journal.read_text().splitlines()
        except FileNotFoundError:
            return set()
        present = set()
        for line in lines:
            match _parsed(line):
                case [int() as index, str() as digest] if 0 <= index < self._num_parts:
                    data = os.pread(descriptor, self._length(index), index * self.part_bytes)
                    if blake3(data).hexdigest() == digest:
                        present.add(index)
        return present


def remove_partial_files(folder: Path) -> None:
    """Delete what unfinished downloads left in a folder, with their journals."""
    for path in [*folder.glob("*.parts"), *folder.glob("*.part")]:
        path.unlink()


def check_digest(file: ModelFile, chunks: Iterator[bytes]) -> tuple[str, str]:
    """SHA-256 of some content, and its difference from a file's digest; empty if there is none."""
    kind, _, promised = file.digest.partition(":")
    sha256, git = hashlib.sha256(), hashlib.sha1(usedforsecurity=False)
    git.update(f"blob {file.size}\0".encode())
    for chunk in chunks:
        sha256.update(chunk)
        if kind == "git":
            git.update(chunk)
    computed = git.hexdigest() if kind == "git" else sha256.hexdigest()
    if computed == promised:
        return sha256.hexdigest(), ""
    return sha256.hexdigest(), f"{file.name} has {kind} {computed}, and {promised} was promised"


def _read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:  # torn by a kill
        return None
