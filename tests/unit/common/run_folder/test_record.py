"""The run record on a folder and on an object store."""

from collections.abc import Callable
from pathlib import Path

import pytest

from etude.common.blobs import MemoryStore, open_store
from etude.common.run_folder.record import (
    FolderRecord,
    RunRecord,
    StoreRecord,
    latest_rows,
    open_record,
)

Reopen = Callable[[], RunRecord]


@pytest.fixture(params=["folder", "store"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    if request.param == "folder":
        return lambda: FolderRecord(tmp_path)
    store = MemoryStore()
    return lambda: StoreRecord(store)


def test_rows_come_back_in_the_order_written_over_restarts(reopen: Reopen) -> None:
    reopen().append([{"kind": "step", "step": 1}, {"kind": "step", "step": 2}])
    again = reopen()
    again.append([{"kind": "event"}])
    again.append([{"kind": "step", "step": 3}])
    assert [row.get("step") for row in reopen().rows()] == [1, 2, None, 3]


def test_rollouts_of_a_step_replace_those_written_before(reopen: Reopen) -> None:
    record = reopen()
    record.write_rollouts(12, "train", [{"rollout_id": "a"}])
    record.write_rollouts(12, "train", [{"rollout_id": "b"}, {"rollout_id": "ü"}])
    record.write_rollouts(0, "eval-held-out", [{"rollout_id": "c"}])
    assert [row["rollout_id"] for row in reopen().rollouts(12, "train")] == ["b", "ü"]
    assert reopen().splits() == [(0, "eval-held-out"), (12, "train")]
    assert list(reopen().rollouts(3, "train")) == []


def test_a_line_torn_by_a_kill_hides_nothing_behind_it(tmp_path: Path) -> None:
    record = FolderRecord(tmp_path)
    record.append([{"step": 1}])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "lo')
    record.append([{"step": 3}])
    assert [row["step"] for row in record.rows()] == [1, 3]


def test_the_store_decides_the_kind_of_record(tmp_path: Path) -> None:
    record = open_record(open_store(f"file://{tmp_path}/run"))
    record.append([{"step": 1}])
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b'{"step":1}\n'
    assert isinstance(open_record(MemoryStore()), StoreRecord)


def test_a_step_done_again_after_a_resume_replaces_the_first() -> None:
    rows: list[dict[str, object]] = [
        {"kind": "step", "phase": "rl", "step": 1, "loss": 1.0},
        {"kind": "event", "reason": "Resumed"},
        {"kind": "event", "reason": "Resumed"},
        {"kind": "step", "phase": "rl", "step": 1, "loss": 2.0},
        {"kind": "eval", "phase": "rl", "step": 1, "name": "held-out"},
        {"kind": "eval", "phase": "rl", "step": 1, "name": "other"},
    ]
    kept = latest_rows(rows)
    assert [row.get("loss") for row in kept if row["kind"] == "step"] == [2.0]
    assert len(kept) == 5
