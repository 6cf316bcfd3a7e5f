"""A node's templates on its disk, so that a successor need not boot them again.

templates/<compat_key>/seal       keyed digest of the address
                      /memory /vmstate /root.sqsh

A monitor trusts them, so none is used before it is what this node wrote: the address by its keyed
BLAKE3, memory and state by the address. Nobody else can write there, and nobody does later.
"""

import hmac
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from etude.envserver.drivers.firecracker import template
from etude.envserver.drivers.firecracker.bodies import MEMORY, ROOT, STATE

log = logging.getLogger(__name__)

_SEAL = "seal"
_CODE_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The templates of one node."""

    folder: Path
    """Private to the node."""
    key: bytes
    """Known to the node alone."""

    def find(self, compat_key: str) -> str | None:
        """The address of the template that is kept, if it is sound. Call it on a thread.

        Raises:
            OSError: it cannot be read.
        """
        folder = self.at(compat_key)
        try:
            seal = (folder / _SEAL).read_bytes()
            found = template.address(compat_key, folder)
            is_whole = (folder / ROOT).is_file()
        except FileNotFoundError:
            return None
        if not is_whole or not hmac.compare_digest(seal, self._code(compat_key, found)):
            log.warning("a template is booted again: %s is not what this node wrote", folder)
            return None
        return found

    @contextmanager
    def making(self, compat_key: str) -> Iterator[Path]:
        """An empty folder, whose files are kept once the block has ended. That takes 1 ms a MiB.

        Raises:
            OSError: it cannot be written.
        """
        partial = self.folder / f".{compat_key}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        try:
            yield partial
            found = template.address(compat_key, partial)
            (partial / _SEAL).write_bytes(self._code(compat_key, found))
            for name in (MEMORY, STATE, ROOT, _SEAL):
                _sync(partial / name)
            shutil.rmtree(self.at(compat_key), ignore_errors=True)
            partial.rename(self.at(compat_key))
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def at(self, compat_key: str) -> Path:
        """The folder of a template."""
        return self.folder / compat_key

    def _code(self, compat_key: str, address: str) -> bytes:
        return blake3(f"{compat_key} {address}".encode(), key=self.key).digest(_CODE_BYTES)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
