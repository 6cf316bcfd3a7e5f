"""A model folder in an object store or on this machine, as a source to copy."""

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath

from typing_extensions import override

from etude.common.api.storage import StoreAccess
from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.model_sources.files import ModelFile, RemoteModel, select_files
from etude.common.stores import open_source

RANGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreModel(RemoteModel):
    """A folder of a store, which must not change meanwhile: files are checked against digests."""

    uri: str
    name: str
    files: tuple[ModelFile, ...]
    store: Store

    @override
    def read(self, file: ModelFile, start: int, length: int) -> bytes:
        return self.store.get_range(file.name, start, length)


def open_store_model(uri: str, access: StoreAccess, *, with_digests: bool) -> StoreModel:
    """The model in a folder or a prefix.

    Args:
        uri: file:///folder or s3://bucket/prefix.
        access: endpoint and region.
        with_digests: read every file once for its digest; without, digests are empty.

    Raises:
        UserError: nothing is there, or the model is refused.
        StoreError: the store does not answer.
    """
    store = open_source(uri, access)
    sizes = {info.key: info.size for info in store.list("")}
    used = select_files([key for key in sizes if "/" not in key], where=uri)
    files = [
        ModelFile(name, sizes[name], _digest(store, name, sizes[name]) if with_digests else "")
        for name in used
    ]
    return StoreModel(
        uri=uri.rstrip("/"), name=PurePosixPath(uri).name, files=tuple(files), store=store
    )


def _digest(store: Store, name: str, size: int) -> str:
    digest = hashlib.sha256()
    read = 0
    while read < size:
        part = store.get_range(name, read, min(RANGE_BYTES, size - read))
        digest.update(part)
        read += len(part)
    if read != size:
        raise CorruptError(f"{store.url}/{name}: {read} bytes, not {size}")
    return f"sha256:{digest.hexdigest()}"
