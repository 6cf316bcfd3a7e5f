"""Reads of folders and of prefixes in an object store, with a host's own credentials or none."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from etude.common import stores
from etude.common.api.storage import StoreAccess
from etude.common.blobs import Store


class StoreReads(Protocol):
    """Reads of images, tasks and models by their URIs; call it on a thread."""

    def open(self, uri: str) -> Store:
        """The store at a URI, to read from.

        Raises:
            UserError: the URI names no store, or no folder that is here.
        """
        ...

    def local_folder(self, uri: str, scratch: Path) -> Path:
        """A local folder with the content of a URI: the folder itself, or a copy of the prefix.

        Args:
            uri: of a folder or of a prefix in a bucket.
            scratch: folder for copies.

        Raises:
            UserError: the URI holds no files.
            CorruptError: an object's key would leave the folder.
            StoreError: the store is unavailable, or refuses.
        """
        ...

    def visit_folder(self, uri: str, scratch: Path) -> AbstractContextManager[Path]:
        """Open a local folder with the content of a URI, to be read once.

        Args:
            uri: as of local_folder, whose errors it raises.
            scratch: folder for copies; one that could be had again ends with the block.
        """
        ...


@dataclass(frozen=True, slots=True)
class DirectReads(StoreReads):
    """Reads with the credentials of this process."""

    access: StoreAccess = field(default_factory=StoreAccess)

    @override
    def open(self, uri: str) -> Store:
        return stores.open_source(uri, self.access)

    @override
    def local_folder(self, uri: str, scratch: Path) -> Path:
        return stores.local_folder(uri, scratch, self.access)

    @override
    def visit_folder(self, uri: str, scratch: Path) -> AbstractContextManager[Path]:
        return stores.temporary_folder(uri, scratch, self.access)
