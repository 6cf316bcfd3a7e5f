"""Blocks of Parquet files: row groups, read by range from a store."""

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from etude.common.blobs import Store
from etude.trainer.learner.data.encoding import refuse_row

COLUMNS = ("messages", "text")
"""Columns to learn from; of the others only tools is read."""


def row_group_sizes(store: Store, key: str, size: int) -> list[int]:
    """Read a file's footer; returns the bytes of each row group's columns to learn from.

    Raises:
        UserError: the file is damaged, or has neither column.
        StoreError: the store does not answer.
    """
    metadata = _open(store, key, size).metadata
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    return [
        sum(
            group.column(place).total_compressed_size
            for place in range(group.num_columns)
            if group.column(place).path_in_schema.split(".")[0] in COLUMNS
        )
        for group in groups
    ]


def read_row_group(store: Store, key: str, size: int, index: int) -> Iterator[dict[str, object]]:
    """Read the rows of one row group, as JSON values.

    Raises:
        UserError: the file is damaged, or has neither column.
        StoreError: the store does not answer.
    """
    file = _open(store, key, size)
    columns = [name for name in file.schema_arrow.names if name in {*COLUMNS, "tools"}]
    try:
        table = file.read_row_group(index, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as cause:
        refuse_row(f"{store.url}/{key}", f"row group {index} cannot be read: {cause}")
    for batch in table.to_batches(max_chunksize=1024):
        try:
            rows = batch.to_pylist()
        except UnicodeError as cause:
            refuse_row(
                f"{store.url}/{key}", f"row group {index} has text that is not UTF-8: {cause}"
            )
        yield from rows


def _open(store: Store, key: str, size: int) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(_RangeFile(store, key, size), pre_buffer=True)
    except (pa.ArrowException, OSError) as cause:
        refuse_row(f"{store.url}/{key}", f"is not a Parquet file: {cause}")
    if not set(file.schema_arrow.names) & set(COLUMNS):
        names = ", ".join(file.schema_arrow.names[:8])
        refuse_row(f"{store.url}/{key}", f"has neither a column messages nor text, but {names}")
    return file


class _RangeFile(io.RawIOBase):
    """A stored object as a read-only file; each read is one range request."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        super().__init__()
        self._store, self._key, self._size = store, key, size
        self._at = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        length = left if size < 0 else min(size, left)
        data = self._store.get_range(self._key, self._at, length) if length else b""
        self._at += length
        return data

    @override
    def readall(self) -> bytes:
        return self.read()
