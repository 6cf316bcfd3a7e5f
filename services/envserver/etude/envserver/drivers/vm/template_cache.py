"""Template cache on disk: the half that QEMU and Firecracker share, and addresses of templates."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from etude.envserver.drivers.vm import sealed_files
from etude.envserver.drivers.vm.dirty_pages import PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCache:
    """Cached templates of one host."""

    folder: Path
    key: bytes
    """Secret key of the host."""

    def folder_of(self, compat_key: str) -> Path:
        return self.folder / compat_key

    @contextmanager
    def replacing(self, compat_key: str) -> Iterator[Path]:
        """Open an empty folder, which becomes the template's at the end of the block."""
        partial = self.folder / f".{compat_key}.partial"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        try:
            yield partial
            shutil.rmtree(self.folder_of(compat_key), ignore_errors=True)
            partial.rename(self.folder_of(compat_key))
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def template_address(key: str, memory: int, devices: bytes, disk: bytes) -> str:
    """Compute the address of a template from its content.

    Pages of zeros are ignored: reading a hole of the memory allocates one. Of its disk it has the
    digest.
    """
    numbers, contents = blake3(), blake3()
    for offset, pages in sealed_files.nonzero_pages(memory):
        numbers.update((offset // PAGE_BYTES).to_bytes(8, "big"))
        numbers.update((len(pages) // PAGE_BYTES).to_bytes(8, "big"))
        contents.update(pages)
    parts = (key.encode(), blake3(devices).digest(), numbers.digest(), contents.digest(), disk)
    return blake3(b"".join(parts)).hexdigest()
