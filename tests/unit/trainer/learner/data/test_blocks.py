"""Files of a dataset and their blocks."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.api.storage import Storage
from etude.common.blobs import open_store
from etude.common.errors import UserError
from etude.trainer.learner.data import jsonl_blocks
from etude.trainer.learner.data.blocks import read_block
from etude.trainer.learner.data.files import list_blocks, list_files, listing_digest

ROWS: list[dict[str, object]] = [{"text": f"document {index} é"} for index in range(50)]


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        packed = {".gz": gzip.compress(data), ".zst": zstandard.compress(data)}
        path.write_bytes(packed.get(path.suffix, data))


def read_all(uri: str, folder: Path) -> list[object]:
    files = list_files(uri, Storage(uri=f"file://{folder}"))
    return [row.value for block in list_blocks(files) for row in read_block(block)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_kind_of_file_gives_its_rows_in_order(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / name, ROWS)
    assert read_all(f"file://{tmp_path}/{name}", tmp_path) == ROWS


def test_parquet_gives_transcripts_too_and_leaves_other_columns_out(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    write_rows(tmp_path / "a.parquet", [{"messages": messages, "id": 3}])
    assert read_all(f"file://{tmp_path}/a.parquet", tmp_path) == [{"messages": messages}]


def test_a_folder_gives_the_files_below_it_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_rows(tmp_path / "b.jsonl", ROWS[:2])
    write_rows(tmp_path / "a.parquet", ROWS[2:4])
    write_rows(tmp_path / "sub" / "c.jsonl", ROWS[4:5])
    (tmp_path / "README.md").write_text("not data")
    assert read_all(f"file://{tmp_path}", tmp_path) == [*ROWS[2:4], *ROWS[:2], ROWS[4]]


@settings(max_examples=30)
@given(
    lines=st.lists(st.binary(max_size=12).map(lambda b: b.hex().encode()), max_size=12),
    length=st.integers(1, 40),
    ends=st.booleans(),
)
def test_each_line_is_in_exactly_one_range(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], length: int, *, ends: bool
) -> None:
    folder = tmp_path_factory.mktemp("data")
    rows = [b'"' + line + b'"' for line in lines]
    data = b"\n".join(rows) + (b"\n" if ends and rows else b"")
    (folder / "a.jsonl").write_bytes(data)
    store = open_store(f"file://{folder}")
    found = [
        row.value
        for start in range(0, len(data), length)
        for row in jsonl_blocks.read_range(store, "a.jsonl", len(data), start=start, length=length)
    ]
    assert found == [line.decode() for line in lines]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "byte 14 .*is not JSON"),
        ("a.jsonl.gz", b"no gzip", "is damaged"),
        ("a.jsonl.zst", b"no zstd", "is damaged"),
        ("a.parquet", b"PAR1 nothing", "is not a Parquet file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_all(f"file://{tmp_path}/{name}", tmp_path)


def test_parquet_without_a_column_to_learn_from_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", [{"body": "x"}])
    with pytest.raises(UserError, match="has neither a column messages nor text, but body"):
        read_all(f"file://{tmp_path}/a.parquet", tmp_path)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("not data")
    with pytest.raises(UserError, match="holds no file that ends with"):
        list_files(f"file://{tmp_path}", Storage(uri=f"file://{tmp_path}"))


def test_the_digest_of_the_files_changes_with_a_size(tmp_path: Path) -> None:
    storage = Storage(uri=f"file://{tmp_path}")
    write_rows(tmp_path / "a.jsonl", ROWS)
    before = listing_digest(list_files(f"file://{tmp_path}", storage))
    write_rows(tmp_path / "a.jsonl", ROWS[1:])
    assert listing_digest(list_files(f"file://{tmp_path}", storage)) != before
