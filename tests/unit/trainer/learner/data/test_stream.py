"""Streams of training batches, and their cursors."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.support.trainer.thread_ranks import run_thread_ranks

from etude.common.api.storage import Storage
from etude.common.errors import CorruptError, UserError
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.data import files
from etude.trainer.learner.data.encoding import refuse_row
from etude.trainer.learner.data.jsonl_blocks import JsonRow
from etude.trainer.learner.data.stream import DatasetStream, TokenStream, read_cursor
from etude.trainer.learner.data.windows import RankExchange, SingleRank, WindowReader

CAPACITY = 64


def encode(row: JsonRow) -> Iterator[SupervisedSequence]:
    """A row [id, length] becomes its id, so many times."""
    match row.value:
        case {"text": str(text)}:
            number, length = map(int, text.split())
        case _:
            refuse_row(row.where, "no text")
    ids = np.full(length, number, dtype=np.int32)
    yield SupervisedSequence(token_ids=ids, weights=np.ones(length, dtype=np.float32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, first, count in (("a", 0, 300), ("b", 1_000, 200)):
        rows = [{"text": f"{first + i} {1 + i * 7 % 40}"} for i in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def stream(
    folder: Path,
    *,
    cursor: str = "",
    ranks: RankExchange | None = None,
    weights: dict[str, float] | None = None,
    capacity: int = CAPACITY,
) -> TokenStream:
    storage = Storage(uri=f"file://{folder}")
    shares = weights or {"a": 1.0, "b": 1.0}
    listed = {name: files.list_files(f"file://{folder}/{name}.jsonl", storage) for name in shares}
    digests = {name: files.listing_digest(each) for name, each in listed.items()}
    cursors = read_cursor(cursor, digests, weights=shares, capacity=capacity)
    pool = ThreadPoolExecutor(1)
    datasets = [
        DatasetStream(
            name=name,
            reader=WindowReader(
                blocks=files.list_blocks(each, block_bytes=256),
                encode=encode,
                ranks=ranks or SingleRank(),
                capacity=capacity,
                seed=5,
                window_bytes=2_000,
            ),
            cursor=cursors[name],
            pool=pool,
        )
        for name, each in listed.items()
    ]
    return TokenStream(datasets=datasets, weights=shares, rows_per_batch=4)


def ids(batch: Sequence[SupervisedSequence]) -> list[tuple[int, int]]:
    return [(int(each.token_ids[0]), each.token_ids.size) for each in batch]


def test_one_pass_gives_every_sequence_once(folder: Path) -> None:
    taken = stream(folder, weights={"a": 1.0})
    dataset = taken.datasets[0]
    seen: Counter[tuple[int, int]] = Counter()
    while True:
        row = dataset.take_row()
        if dataset.cursor.pass_number:
            break
        seen.update(ids(row))
    assert seen == Counter((i, 1 + i * 7 % 40) for i in range(300))


def test_a_stream_goes_on_from_its_cursor_as_if_it_had_not_stopped(folder: Path) -> None:
    whole = stream(folder)
    batches = [ids(whole.take_batch()) for _ in range(60)]
    for stopped_after in (0, 1, 7, 23, 59):
        first = stream(folder)
        for _ in range(stopped_after):
            first.take_batch()
        rest = stream(folder, cursor=first.cursor() if stopped_after else "")
        assert ids(rest.take_batch()) == batches[stopped_after]


def run_ranks(folder: Path, size: int) -> list[list[list[tuple[int, int]]] | Exception]:
    def run(rank: RankExchange) -> list[list[tuple[int, int]]] | Exception:
        taken = stream(folder, ranks=rank)
        try:
            return [ids(taken.take_batch()) for _ in range(40)]
        except UserError as error:
            return error

    return run_thread_ranks(size, run)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_number_of_ranks_sees_the_same_batches(folder: Path, size: int) -> None:
    alone = stream(folder)
    expected = [ids(alone.take_batch()) for _ in range(40)]
    assert run_ranks(folder, size) == [expected] * size


def test_a_bad_row_stops_all_ranks(folder: Path) -> None:
    with (folder / "b.jsonl").open("a") as file:
        file.write('{"body": 1}\n')
    errors = run_ranks(folder, 3)
    assert all(isinstance(each, UserError) for each in errors)
    assert len({str(each) for each in errors}) == 1


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3.0, 1.0), (0.1, 0.9)])
def test_tokens_follow_the_weights_of_the_datasets(folder: Path, a: float, b: float) -> None:
    taken = stream(folder, weights={"a": a, "b": b})
    for _ in range(200):
        taken.take_batch()
    tokens = {each.name: each.cursor.tokens for each in taken.datasets}
    assert abs(tokens["a"] / sum(tokens.values()) - a / (a + b)) <= CAPACITY / sum(tokens.values())


def test_a_cursor_of_other_files_is_refused(folder: Path) -> None:
    taken = stream(folder)
    taken.take_batch()
    (folder / "a.jsonl").write_text('{"text": "1 1"}\n')
    with pytest.raises(UserError, match=r"dataset a.*has other files than when the run stopped"):
        stream(folder, cursor=taken.cursor())


def test_a_damaged_cursor_is_refused() -> None:
    with pytest.raises(CorruptError, match="data cursor"):
        read_cursor("{", {}, weights={}, capacity=1)


def test_a_dataset_without_a_sequence_is_refused(folder: Path) -> None:
    (folder / "a.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="a whole pass over the data holds no sequence"):
        stream(folder, weights={"a": 1.0}).take_batch()


def test_a_dataset_that_is_added_does_not_catch_up_alone(folder: Path) -> None:
    first = stream(folder, weights={"a": 1.0})
    for _ in range(50):
        first.take_batch()
    both = stream(folder, cursor=first.cursor(), weights={"a": 1.0, "b": 1.0})
    before = {each.name: each.cursor.tokens for each in both.datasets}
    for _ in range(20):
        both.take_batch()
    taken = {each.name: each.cursor.tokens - before[each.name] for each in both.datasets}
    assert abs(taken["a"] - taken["b"]) <= 2 * CAPACITY


def test_rows_of_another_size_begin_with_the_window(folder: Path) -> None:
    first = stream(folder, weights={"a": 1.0})
    first.take_batch()
    wider = stream(folder, cursor=first.cursor(), weights={"a": 1.0}, capacity=2 * CAPACITY)
    again = stream(folder, weights={"a": 1.0}, capacity=2 * CAPACITY)
    assert ids(wider.take_batch()) == ids(again.take_batch())
