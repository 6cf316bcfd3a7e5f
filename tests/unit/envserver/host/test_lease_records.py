"""What a node's successor can read back."""

from pathlib import Path

import pytest

from etude.common.errors import CorruptError
from etude.envserver.host.leases import records
from etude.envserver.host.leases.records import CallLog, LeaseRecord
from etude.v1 import environments_pb2


@pytest.fixture
def record() -> LeaseRecord:
    lease = environments_pb2.Lease(lease_id="a-1", agent_token="t", expires_unix_ms=7)
    held = environments_pb2.HeldLease(lease=lease, idempotency_key="k", index=3, run_id="r")
    return LeaseRecord(
        held=held, template="p", uri="file:///x", toolset="Compact", source_key="abc"
    )


def response(*call_ids: str) -> environments_pb2.RunTurnResponse:
    results = [environments_pb2.ToolResult(call_id=i, content=b"\xff\0") for i in call_ids]
    return environments_pb2.RunTurnResponse(results=results)


def test_a_lease_is_read_back_as_it_was_written(tmp_path: Path, record: LeaseRecord) -> None:
    folder = tmp_path / "a-1"
    folder.mkdir()
    records.save_record(folder, record)

    assert records.load_record(folder) == record
    assert (folder / "state.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["missing", "cut", "json", "field", "moved"])
def test_a_damaged_lease_is_no_lease(tmp_path: Path, record: LeaseRecord, damage: str) -> None:
    folder = tmp_path / "a-1"
    folder.mkdir()
    records.save_record(folder, record)
    state = folder / "state.json"
    match damage:
        case "missing":
            state.unlink()
        case "cut":
            state.write_bytes(state.read_bytes()[:40])
        case "json":
            state.write_text("[]")
        case "field":
            state.write_text(state.read_text().replace("toolset", "toolsets"))
        case _:
            folder = folder.rename(tmp_path / "a-2")

    with pytest.raises(CorruptError):
        records.load_record(folder)


def test_results_are_read_back_by_call(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "calls")
    log.begin("before")
    log.end({"1": "d1", "2": "d2"}, response("1", "2"))
    log.close()

    found = records.read_calls(tmp_path / "calls")

    assert found.results["2"].content == b"\xff\0"
    assert found.digests == {"1": "d1", "2": "d2"}
    assert found.before is None


def test_a_turn_without_an_end_was_cut_off(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "calls")
    log.begin("one")
    log.end({"1": "d"}, response("1"))
    log.begin("two")
    log.close()

    found = records.read_calls(tmp_path / "calls")

    assert found.before == "two"
    assert found.results.keys() == {"1"}


def test_a_torn_last_line_counts_as_not_written(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "calls")
    log.begin("one")
    log.end({"1": "d"}, response("1"))
    log.close()
    whole = (tmp_path / "calls").read_bytes()
    (tmp_path / "calls").write_bytes(whole[:-5])

    assert records.read_calls(tmp_path / "calls") == ({}, {}, "one")


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "calls").write_text('{"begin": "a"}\nnonsense\n{"begin": "b"}\n')

    with pytest.raises(CorruptError, match="line 2"):
        records.read_calls(tmp_path / "calls")


def test_a_lease_without_calls_has_no_history(tmp_path: Path) -> None:
    assert records.read_calls(tmp_path / "calls") == ({}, {}, None)
