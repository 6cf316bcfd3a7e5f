"""Sealed copies of models in a store: files below a content-addressed prefix, manifest last.

    models/<name>-<address>/<file>      the model folder, and nothing else
    models/<name>-<address>.json        its manifest: source, sizes, digests; written last
    models/pins/<address of uri>.json   commit and prefix of a URI that a run names; written first

A pin makes a branch or a tag mean the same commit for the life of the run. With the manifest
there, the source is asked for nothing.
"""

import fcntl
import mmap
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, TypeVar

from blake3 import blake3
from pydantic import Field, ValidationError

from etude.common.api.meta import Model
from etude.common.blobs import ExistsError, MissingError, Store
from etude.common.errors import CorruptError, Problem, UserError
from etude.common.model_sources.files import ModelFile, RemoteModel, check_model
from etude.common.model_sources.parts import (
    PART_BYTES,
    PartialFile,
    check_digest,
    remove_partial_files,
)

M = TypeVar("M", bound=Model)

ROOT = "models/"
Progress = Callable[[int, int], None]
"""Called with the bytes that are copied and the bytes of all files, from several threads."""


class CopiedFile(Model):
    """One file of a sealed copy."""

    name: str
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MirrorManifest(Model):
    """Content of a sealed copy."""

    format: Annotated[int, Field(ge=1, le=1)] = 1
    source: str
    """URI of the source; names the commit if the source has commits."""
    address: str
    """BLAKE3 of names, sizes and digests as the source gives them."""
    files: tuple[CopiedFile, ...]


class Pin(Model):
    """Meaning of a URI for the life of a run."""

    uri: str
    source: str
    """URI with the commit."""
    prefix: Annotated[str, Field(pattern=r"^models/[A-Za-z0-9_][-A-Za-z0-9._]*-[0-9a-f]{32}$")]
    """Key prefix of the copy: where the trainer writes it, and where engines wait for it."""


def content_address(model: RemoteModel) -> str:
    """Address of a model: equal if all files have the same names, sizes and digests."""
    lines = [f"{file.name}\0{file.size}\0{file.digest}\n" for file in model.files]
    return str(blake3("".join(sorted(lines)).encode()).hexdigest()[:32])


def mirror_prefix(model: RemoteModel) -> str:
    """Key prefix of a model's copy, without a slash at its end."""
    name = re.sub(r"[^-A-Za-z0-9._]", "-", model.name).strip(".-") or "model"
    return f"{ROOT}{name[:96]}-{content_address(model)}"


def read_manifest(store: Store, prefix: str) -> MirrorManifest | None:
    """The manifest of a sealed copy; None while it is not sealed.

    Raises:
        CorruptError: it cannot be read.
        StoreError: the store does not answer.
    """
    return _read(store, f"{prefix}.json", MirrorManifest)


def read_pin(store: Store, uri: str) -> Pin | None:
    """The pin of a URI; None if there is none yet.

    Raises:
        CorruptError: it cannot be read.
        StoreError: the store does not answer.
    """
    return _read(store, _pin_key(uri), Pin)


def create_pin(store: Store, uri: str, model: RemoteModel) -> Pin:
    """Pin a URI to a model; the first pin stays.

    Raises:
        StoreError: the store does not answer.
    """
    pin = Pin(uri=uri, source=model.uri, prefix=mirror_prefix(model))
    try:
        store.create(_pin_key(uri), pin.model_dump_json(by_alias=True).encode())
    except ExistsError:
        return read_pin(store, uri) or pin
    return pin


def copy_model(
    model: RemoteModel,
    store: Store,
    *,
    scratch: Path,
    prefix: str = "",
    progress: Progress = lambda *_: None,
    part_bytes: int = PART_BYTES,
) -> str:
    """Copy a model into the store unless it is there; key prefix of the sealed copy.

    Files that are whole in the store, and parts in scratch that have their digest, are not read
    again. In the end no parts are left.

    Args:
        model: to copy.
        store: to copy to.
        scratch: folder with room for the largest file.
        prefix: as a pin gives it; by content unless given.
        progress: told about each part.
        part_bytes: of a file that are asked for in one request.

    Raises:
        UserError: the model is refused, or another process copies it in this scratch folder.
        CorruptError: content has not the promised digest.
        UnavailableError: source or store gave no answer.
        OSError: the scratch folder cannot be written.
    """
    prefix = prefix or mirror_prefix(model)
    if read_manifest(store, prefix) is not None:
        return prefix
    check_model(model)
    count = _Count(sum(file.size for file in model.files), progress)
    with _locked(scratch / prefix) as folder:
        partials = [
            PartialFile(model=model, file=file, folder=folder, part_bytes=part_bytes)
            for file in model.files
        ]
        copied = tuple(_copy_file(partial, store, prefix, count) for partial in partials)
        remove_partial_files(folder)
    manifest = MirrorManifest(source=model.uri, address=content_address(model), files=copied)
    # Sealed by another process meanwhile: equal content has an equal address.
    with suppress(ExistsError):
        store.create(f"{prefix}.json", manifest.model_dump_json(by_alias=True).encode())
    return prefix


def remove_leftovers(scratch: Path, *, keep: str = "") -> None:
    """Remove what killed processes left of downloads; folders in use are left alone.

    Args:
        scratch: as of copy_model.
        keep: prefix of a copy that goes on.

    Raises:
        OSError: the scratch folder cannot be written.
    """
    for folder in (scratch / ROOT).glob("*/"):
        if folder != scratch / keep:
            with suppress(UserError), _locked(folder):
                remove_partial_files(folder)


class _Count:
    """Bytes that are copied, added up for a progress report."""

    def __init__(self, total: int, report: Progress) -> None:
        self.total, self.done, self.report = total, 0, report
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            self.report(self.done, self.total)


def _copy_file(partial: PartialFile, store: Store, prefix: str, count: _Count) -> CopiedFile:
    file, key = partial.file, f"{prefix}/{partial.file.name}"
    info = store.head(key)
    if info is not None and info.size == file.size:  # a put is atomic, after the digest
        count.add(file.size)
        return CopiedFile(name=file.name, size=file.size, sha256=_stored_sha256(file, store, key))
    sha256 = partial.download(count.add)
    with partial.path.open("rb") as content:
        if file.size:
            # Not closed by hand: an error of the store holds a view of the map.
            store.put(key, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ))
        else:
            store.put(key, b"")
    partial.discard()
    return CopiedFile(name=file.name, size=file.size, sha256=sha256)


def _stored_sha256(file: ModelFile, store: Store, key: str) -> str:
    kind, _, digest = file.digest.partition(":")
    if kind == "sha256":
        return digest
    # Only small files have a git digest: the large ones are in LFS.
    sha256, problem = check_digest(file, iter([store.get(key)]))
    if problem:
        raise CorruptError(f"{store.url}/{key}: {problem}")
    return sha256


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            what = "is being copied by another process"
            fix = "wait for that process, or stop it"
            raise UserError(Problem("Conflict", what, str(folder), fix)) from cause
        yield folder


def _read(store: Store, key: str, kind: type[M]) -> M | None:
    try:
        return kind.model_validate_json(store.get(key))
    except MissingError:
        return None
    except ValidationError as cause:
        raise CorruptError(f"{store.url}/{key}: is no {kind.__name__}") from cause


def _pin_key(uri: str) -> str:
    return f"{ROOT}pins/{blake3(uri.encode()).hexdigest()[:32]}.json"
