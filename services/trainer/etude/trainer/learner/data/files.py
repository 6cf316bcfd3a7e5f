"""Files of a dataset: listing by URI, and their blocks, the units in which they are read."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NoReturn

from blake3 import blake3

from etude.common.api.storage import Storage
from etude.common.blobs import Store
from etude.common.errors import Problem, UserError
from etude.common.stores import open_run_store, open_source
from etude.trainer.learner.data import parquet_blocks

BLOCK_BYTES = 1 << 20
"""Bytes of one block of a JSON-lines file: small, so that many ranks share a window."""
MAX_COMPRESSED_BYTES = 256 << 20
"""Largest compressed file: it is one block, because it cannot be read from its middle."""
FOOTER_READERS = 16
"""Parquet footers that are read at the same time."""

JSON_LINES, PARQUET = ".jsonl", ".parquet"
COMPRESSED = (".jsonl.gz", ".jsonl.zst")
SUFFIXES = (JSON_LINES, *COMPRESSED, PARQUET)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a dataset."""

    store: Store
    key: str
    size: int
    suffix: str
    """One of SUFFIXES."""

    @property
    def uri(self) -> str:
        return f"{self.store.url}/{self.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Part of a file that is read at a time."""

    file: DataFile
    start: int
    """First byte in a JSON-lines file, or number of the row group in a Parquet file."""
    num_bytes: int
    """Length of the byte range, or bytes of the row group or of the compressed file."""


def list_files(uri: str, storage: Storage) -> list[DataFile]:
    """List a dataset's files, by name.

    Args:
        uri: one file, or a folder whose files are taken, folders below it included.
        storage: how to reach an object store.

    Raises:
        UserError: there is no file of a known kind, or a compressed one is too large.
        StoreError: the store does not answer.
    """
    files = list(_files_at(uri, storage))
    if not files:
        _refuse(uri, f"holds no file that ends with {', '.join(SUFFIXES)}")
    for file in files:
        if file.suffix in COMPRESSED and file.size > MAX_COMPRESSED_BYTES:
            _refuse(
                file.uri,
                f"has {file.size >> 20} MiB and is compressed as a whole; at most"
                f" {MAX_COMPRESSED_BYTES >> 20} MiB can be",
            )
    return files


def list_blocks(files: Sequence[DataFile], *, block_bytes: int = BLOCK_BYTES) -> list[Block]:
    """List the blocks of all files, in order; reads the footers of Parquet files.

    Raises:
        UserError: a Parquet file is damaged, or has no column to learn from.
        StoreError: the store does not answer.
    """
    with ThreadPoolExecutor(FOOTER_READERS, thread_name_prefix="footer") as pool:
        blocks = pool.map(lambda file: list(_blocks(file, block_bytes)), files)
        return [block for own in blocks for block in own]


def listing_digest(files: Sequence[DataFile]) -> str:
    """Digest of the files' names and sizes: a position in them means nothing in others."""
    listing = "\n".join(f"{file.key}\0{file.size}" for file in files)
    return blake3(listing.encode()).hexdigest()[:16]


def _files_at(uri: str, storage: Storage) -> Iterator[DataFile]:
    folder, _, name = uri.rpartition("/")
    if suffix := _suffix(name):
        store = open_run_store(folder, storage)
        info = store.head(name)
        if info is None:
            _refuse(uri, "is missing")
        yield DataFile(store=store, key=name, size=info.size, suffix=suffix)
        return
    store = open_source(uri, storage)
    for info in sorted(store.list("")):
        suffix = _suffix(PurePosixPath(info.key).name)
        if suffix and info.size:
            yield DataFile(store=store, key=info.key, size=info.size, suffix=suffix)


def _suffix(name: str) -> str:
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def _blocks(file: DataFile, block_bytes: int) -> Iterator[Block]:
    if file.suffix == PARQUET:
        sizes = parquet_blocks.row_group_sizes(file.store, file.key, file.size)
        for index, size in enumerate(sizes):
            yield Block(file=file, start=index, num_bytes=size)
    elif file.suffix in COMPRESSED:
        yield Block(file=file, start=0, num_bytes=file.size)
    else:
        for start in range(0, file.size, block_bytes):
            yield Block(file=file, start=start, num_bytes=min(block_bytes, file.size - start))


def _refuse(where: str, what: str) -> NoReturn:
    raise UserError(
        Problem(
            reason="InvalidData",
            what=what,
            where=where,
            fix="name a file, or a folder of files, of JSON lines (.jsonl, .jsonl.gz, .jsonl.zst)"
            " or Parquet (.parquet)",
        )
    )
