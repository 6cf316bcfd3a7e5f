"""Object stores and folders of inputs by URI, opened with the access of a run or a pool."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from socket import gethostname
from tempfile import TemporaryDirectory, gettempdir

from blake3 import blake3

from etude.common.api.storage import StoreAccess
from etude.common.blobs import ObjectInfo, Store, open_store
from etude.common.errors import CorruptError, Problem, UserError
from etude.common.store_urls import folder_of

RANGE_BYTES = 64 << 20
"""Largest part of an object that is held in memory."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
"""Files of a model folder that hold weights, or say where they are."""


class NothingThereError(UserError):
    """A URI that holds no files."""

    def __init__(self, uri: str) -> None:
        fix = "upload the folder there, or correct the URI"
        super().__init__(Problem("InvalidSpec", "holds no files", uri, fix))


def open_run_store(uri: str, storage: StoreAccess) -> Store:
    """The store at uri, reached with the run's endpoint and region."""
    return open_store(uri, endpoint=storage.endpoint, region=storage.region)


def open_source(uri: str, access: StoreAccess) -> Store:
    """The store at uri, to read from; unlike `open_run_store` it makes no folder.

    Raises:
        NothingThereError: the URI holds no files.
    """
    folder = folder_of(uri)
    if folder is not None and not folder.is_dir():
        raise NothingThereError(uri)
    return open_run_store(uri, access)


def local_folder(
    uri: str, scratch: Path, storage: StoreAccess, *, leave_out: tuple[str, ...] = ()
) -> Path:
    """A local folder with the content of uri: the folder itself, or a download of the prefix.

    A download is used again as long as the prefix holds the same objects.

    Args:
        uri: of a folder or of a prefix in a bucket.
        scratch: folder for downloads.
        storage: access to the bucket.
        leave_out: ends of names that are not downloaded.

    Raises:
        NothingThereError: the URI holds no files.
        CorruptError: an object's key would leave the folder.
    """
    folder = folder_of(uri)
    if folder is not None:
        return existing_folder(folder, uri)
    store = open_run_store(uri, storage)
    found = list_objects(store, uri)
    found = [info for info in found if not info.key.endswith(leave_out)]
    listing = json.dumps([uri, found]).encode()
    # Task folders are known by their last part.
    target = scratch / "inputs" / blake3(listing).hexdigest()[:32] / PurePosixPath(uri).name
    if not target.exists():
        download_objects(store, found, target)
    return target


def existing_folder(folder: Path, uri: str) -> Path:
    """The folder of a URI.

    Raises:
        NothingThereError: it is not there.
    """
    if not folder.exists():
        raise NothingThereError(uri)
    return folder


def list_objects(store: Store, uri: str) -> Sequence[ObjectInfo]:
    """All objects of the prefix at a URI.

    Raises:
        NothingThereError: there are none.
    """
    found = list(store.list(""))
    if not found:
        raise NothingThereError(uri)
    return found


@contextlib.contextmanager
def temporary_folder(uri: str, scratch: Path, storage: StoreAccess) -> Iterator[Path]:
    """A local folder with the content of uri; a download of it is removed with the block.

    For folders that are read once: downloads of the tasks of a large set would fill the disk.

    Raises:
        NothingThereError: the URI holds no files.
        CorruptError: an object's key would leave the folder.
    """
    if folder_of(uri) is not None:
        yield local_folder(uri, scratch, storage)
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="once-", dir=scratch) as downloads:
        yield local_folder(uri, Path(downloads), storage)


def find_model_folder(folder: Path, uri: str, storage: StoreAccess) -> Path:
    """The local folder with a model's configuration and tokenizer, on any host of a run.

    Args:
        folder: where the controller has it.
        uri: object store that the controller fetched it from; empty if it is a shared folder.
        storage: access to the store.

    Raises:
        UserError: the URI holds no files, or the shared folder is not on this host.
        CorruptError: an object's key would leave the folder.
    """
    if folder.exists():
        return folder
    if not uri:
        raise UserError(_not_shared(folder))
    return local_folder(uri, Path(gettempdir()) / "etude", storage, leave_out=WEIGHT_SUFFIXES)


def download_objects(store: Store, objects: Sequence[ObjectInfo], target: Path) -> None:
    """Fill a temporary folder and rename it, so that the target is complete or absent.

    Raises:
        CorruptError: an object's key would leave the folder.
        OSError: the folder cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folders = {str(folder) for info in objects for folder in PurePosixPath(info.key).parents}
    with TemporaryDirectory(prefix="partial-", dir=target.parent) as name:
        partial = Path(name) / target.name
        partial.mkdir()
        for info in objects:
            if info.key in folders:  # the empty object with which S3 consoles show a folder
                continue
            relative = PurePosixPath(info.key)
            if relative.is_absolute() or ".." in relative.parts:
                raise CorruptError(f"{store.url}: key {info.key!r} leaves the prefix")
            path = partial / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            _download_object(store, info, path)
        try:
            partial.rename(target)
        except OSError:
            if not target.exists():  # else another reader of this scratch was faster
                raise


def _download_object(store: Store, info: ObjectInfo, path: Path) -> None:
    """Write an object to a file, a range at a time: files of weights are larger than memory."""
    if info.size <= RANGE_BYTES:
        path.write_bytes(store.get(info.key))
        return
    with path.open("wb") as file:
        for start in range(0, info.size, RANGE_BYTES):
            file.write(store.get_range(info.key, start, min(RANGE_BYTES, info.size - start)))


def _not_shared(folder: Path) -> Problem:
    return Problem(
        reason="InvalidSpec",
        what=f"is not on host {gethostname()}, where a part of the trainer runs",
        where=f"model.uri: {folder.as_uri()}",
        fix="mount the folder on every node, or copy the model into an object store"
        " (etude model import)",
    )
