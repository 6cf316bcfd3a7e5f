"""Blocks of Parquet files: row groups, read by range from a store."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from etude.common.blobs import Store
from etude.trainer.learner.data.encoding import refuse_row

COLUMNS = ("messages", "text")
"""Columns to learn from, of which a file has at least one."""
_READ = frozenset({*COLUMNS, "tools"})
"""All columns that are read."""


def row_group_sizes(store: Store, key: str, size: int) -> list[int]:
    """Read a file's footer; returns the bytes of each row group's columns that are read.

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
            if group.column(place).path_in_schema.split(".")[0] in _READ
        )
        for group in groups
    ]


def read_row_group(store: Store, key: str, size: int, index: int) -> Iterator[dict[str, object]]:
    """Read the rows of one row group, as JSON values.

    An object of a struct column has the keys whose values are not null: such a column has every
    key of every row, null where a row's object lacked it.

    Raises:
        UserError: the file is damaged, or has neither column.
        StoreError: the store does not answer.
    """
    file = _open(store, key, size)
    columns = [name for name in file.schema_arrow.names if name in _READ]
    try:
        table = file.read_row_group(index, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as cause:
        refuse_row(f"{store.url}/{key}", f"row group {index} cannot be read: {cause}")
    read = _find_reader(pa.struct(table.schema))
    for batch in table.to_batches(max_chunksize=1024):
        try:
            rows = batch.to_pylist(maps_as_pydicts="strict")
        except (ValueError, KeyError) as cause:
            refuse_row(
                f"{store.url}/{key}",
                f"row group {index} has text that is not UTF-8, or an object with a key twice:"
                f" {cause}",
            )
        yield from map(read, rows)


def _find_reader(kind: pa.DataType) -> Callable[[Any], Any]:
    """Find what turns values of a type, of which none is null, into JSON values."""
    if pa.types.is_struct(kind):
        readers = {field.name: _find_reader(field.type) for field in kind}
        return lambda row: {
            name: readers[name](value) for name, value in row.items() if value is not None
        }
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        read = _find_reader(kind.value_type)
        return lambda values: [None if value is None else read(value) for value in values]
    if pa.types.is_map(kind):
        read = _find_reader(kind.item_type)
        return lambda values: {
            key: None if value is None else read(value) for key, value in values.items()
        }
    return lambda value: value


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
