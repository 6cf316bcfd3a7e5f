"""Ranks that opened other data than their peers are refused together, by name."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainer.thread_ranks import run_thread_ranks

from etude.common.api.storage import Storage
from etude.common.errors import EtudeError, StoreError
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.data.files import list_blocks, list_files
from etude.trainer.learner.data.rank_exchange import (
    DataListing,
    check_same_data,
    digest_blocks,
    digest_sequences,
)
from etude.trainer.learner.data.windows import RankExchange


def errors_of(listings: list[DataListing]) -> list[str]:
    """Error of each rank; empty where it accepts the data."""

    def check(rank: RankExchange) -> str:
        try:
            check_same_data(listings[rank.rank], rank)
        except EtudeError as error:
            return f"{type(error).__name__} {error}"
        return ""

    return run_thread_ranks(len(listings), check)


def listing(folder: Path) -> DataListing:
    storage = Storage(uri=f"file://{folder}")
    blocks = list_blocks(list_files(f"file://{folder}/data", storage), block_bytes=8)
    return DataListing({"dataset code": digest_blocks(blocks)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"text": "x"}\n')
    return tmp_path


@pytest.mark.parametrize("change", ["grown", "added", "removed", "renamed"])
def test_a_store_that_changes_between_the_listings_of_two_ranks_is_refused_by_name(
    folder: Path, change: str
) -> None:
    first, file = listing(folder), folder / "data" / "b.jsonl"
    match change:
        case "grown":
            file.write_text('{"text": "xy"}\n')
        case "added":
            (folder / "data" / "c.jsonl").write_text("{}\n")
        case "removed":
            file.unlink()
        case _:
            file.rename(folder / "data" / "c.jsonl")
    second = listing(folder)
    errors = errors_of([first, first, second])
    assert len(set(errors)) == 1
    assert errors[0].startswith("UserError")
    assert "dataset code  is not the same for rank 0 and for 2" in errors[0]
    assert errors_of([second, second, second]) == ["", "", ""]


def test_a_parquet_file_whose_row_groups_were_cut_anew_is_refused(folder: Path) -> None:
    path = folder / "data" / "c.parquet"
    table = pa.table({"text": [f"row {index}" for index in range(40)]})
    pq.write_table(table, path, row_group_size=10)
    first = listing(folder)
    pq.write_table(table, path, row_group_size=20)
    assert "dataset code" in errors_of([first, listing(folder)])[1]


def test_an_error_of_one_rank_is_raised_by_all(folder: Path) -> None:
    failed = DataListing({}, StoreError("503 Slow Down"))
    errors = errors_of([listing(folder), failed, listing(folder)])
    assert errors == ["StoreError 503 Slow Down"] * 3


_TOKENS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4)


def sequences(tokens: list[list[int]]) -> list[SupervisedSequence]:
    return [
        SupervisedSequence(
            token_ids=np.asarray(ids, dtype=np.int32), weights=np.ones(len(ids), dtype=np.float32)
        )
        for ids in tokens
    ]


@given(one=_TOKENS, other=_TOKENS)
def test_digests_of_sequences_are_equal_exactly_if_the_sequences_are(
    one: list[list[int]], other: list[list[int]]
) -> None:
    digests = digest_sequences(sequences(one)), digest_sequences(sequences(other))
    assert (digests[0] == digests[1]) == (one == other)


def test_data_that_one_rank_alone_has_is_refused() -> None:
    errors = errors_of([DataListing({}), DataListing({"validation dataset v": "0"})])
    assert all("validation dataset v  is not the same" in error for error in errors)
