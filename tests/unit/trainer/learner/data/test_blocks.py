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


def test_objects_of_parquet_have_the_keys_of_their_own_row_alone(tmp_path: Path) -> None:
    def write_row(path: str, *, is_list: bool) -> dict[str, object]:
        key, kind = ("paths", {"type": "array"}) if is_list else ("path", {"enum": ["a", None]})
        call = {"function": {"name": "read", "arguments": {key: path}}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        schema = {"name": "read", "parameters": {"properties": {key: kind}}}
        return {"messages": messages, "tools": [{"function": schema}]}

    rows = [write_row("a", is_list=True), write_row("b", is_list=False)]
    write_rows(tmp_path / "a.parquet", rows)
    assert read_all(f"file://{tmp_path}/a.parquet", tmp_path) == rows


def test_a_map_of_parquet_is_an_object_that_keeps_its_nulls(tmp_path: Path) -> None:
    kind = pa.list_(
        pa.struct({"default": pa.map_(pa.string(), pa.struct({"b": pa.int8(), "c": pa.int8()}))})
    )
    table = pa.table(
        {
            "text": ["x", "y"],
            "tools": pa.array([[{"default": [("a", None), ("d", {"b": 1})]}], None], kind),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    rows = read_all(f"file://{tmp_path}/a.parquet", tmp_path)
    assert rows == [
        {"text": "x", "tools": [{"default": {"a": None, "d": {"b": 1}}}]},
        {"text": "y"},
    ]


def test_a_key_that_a_map_of_parquet_has_twice_is_refused(tmp_path: Path) -> None:
    twice = pa.array([[("a", "1"), ("a", "2")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"text": ["x"], "tools": twice}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row group 0 has text that is not UTF-8, or an object"):
        read_all(f"file://{tmp_path}/a.parquet", tmp_path)


def test_a_block_of_parquet_has_the_size_of_all_columns_that_are_read(tmp_path: Path) -> None:
    tools = json.dumps([{"name": f"tool {index}"} for index in range(100)])
    rows: list[dict[str, object]] = [{"text": "x", "other": "y" * 5000, "tools": tools}]
    write_rows(tmp_path / "a.parquet", rows)
    group = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    read = [column for column in map(group.column, range(3)) if column.path_in_schema != "other"]
    (block,) = list_blocks(list_files(f"file://{tmp_path}", Storage(uri=f"file://{tmp_path}")))
    assert block.num_bytes == sum(column.total_compressed_size for column in read)


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
