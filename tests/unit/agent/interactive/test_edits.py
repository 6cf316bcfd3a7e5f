"""Edits in a user's files are looked at again, by hashes of their lines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.agent.interactive.edits import (
    HORIZONS_S,
    MAX_EDITS,
    AppliedEdit,
    EditJournal,
    MachineTime,
    observe_edits,
    read_machine_time,
)
from etude.common.feedback.client import (
    EventAuthor,
    EventClient,
    EventContext,
    UserConsent,
    hash_lines,
)
from etude.common.feedback.http_exchange import HttpAnswer
from etude.common.feedback.spool import EventSpool

SECRET = b"s" * 32
LINES = ("def add(a, b):", "    return a + b", "print(add(1, 2))")
CONSENT = UserConsent(granted=True, terms="2026-11", decided="2026-11-01T08:00:00Z")


def post(path: str, media_type: str, body: bytes) -> HttpAnswer:
    raise ConnectionRefusedError


def make_client(folder: Path, *, granted: bool = True) -> EventClient:
    author = EventAuthor("etude-agent/0.1.0", "acme", "u-1")
    return EventClient(EventSpool(folder), post, author, CONSENT._replace(granted=granted))


def waiting(client: EventClient) -> Sequence[dict[str, Any]]:
    lines = client.spool.read_batch(max_events=1_000, max_bytes=1 << 30).lines
    return [json.loads(line) for line in lines]


def looks(client: EventClient) -> list[dict[str, Any]]:
    return [each["data"]["payload"] for each in waiting(client)]


def at(seconds: float, *, boot_id: str = "b", wall_s: float = 1e9) -> MachineTime:
    return MachineTime(boot_id, 1_000 + seconds, wall_s + seconds)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "core.py"
    file.write_text("\n".join(["import os", *LINES]))
    return file


@pytest.fixture
def journal(tmp_path: Path, file: Path) -> EditJournal:
    journal = EditJournal(tmp_path / "edits")
    journal.add(edit("e-1", file))
    return journal


def edit(name: str, file: Path, made: MachineTime | None = None) -> AppliedEdit:
    return AppliedEdit(
        edit=name,
        path=str(file),
        line_hashes=tuple(hash_lines(SECRET, LINES)),
        made=made or at(0),
        about=EventContext("c-1", "r-1", "1.3"),
    )


def test_an_edit_is_looked_at_once_at_each_horizon_and_then_forgotten(
    tmp_path: Path, file: Path, journal: EditJournal
) -> None:
    client = make_client(tmp_path / "spool")
    for horizon_s in HORIZONS_S:
        early, late = at(horizon_s - 1), at(horizon_s + 1)
        assert observe_edits(journal, client, SECRET, read_time=lambda t=early: t) == 0  # type: ignore[misc]
        assert observe_edits(journal, client, SECRET, read_time=lambda t=late: t) == 1  # type: ignore[misc]
        assert observe_edits(journal, client, SECRET, read_time=lambda t=late: t) == 0  # type: ignore[misc]
        kept = file.read_text().splitlines()
        file.write_text("\n".join(kept[:-1]))
    assert [look["numAliveLines"] for look in looks(client)] == [3, 2, 1, 0]
    assert [look["ageS"] for look in looks(client)] == [each + 1 for each in HORIZONS_S]
    assert journal.list_files() == []
    ids = [each["id"] for each in waiting(client)]
    assert ids == [f"e-1-look-{number}" for number in (1, 2, 3, 4)]


def test_indentation_does_not_count_and_an_unseen_file_is_censored(
    tmp_path: Path, file: Path, journal: EditJournal
) -> None:
    client = make_client(tmp_path / "spool")
    file.write_text("class A:\n    def add(a, b):\n        return a + b\n")
    observe_edits(journal, client, SECRET, read_time=lambda: at(301))
    file.unlink()
    observe_edits(journal, client, SECRET, read_time=lambda: at(3_601))
    assert looks(client) == [
        {"edit": "e-1", "ageS": 301.0, "isFileSeen": True, "numAliveLines": 2},
        {"edit": "e-1", "ageS": 3_601.0, "isFileSeen": False},
    ]


def test_one_late_look_stands_for_the_horizons_before_it(
    tmp_path: Path, journal: EditJournal
) -> None:
    client = make_client(tmp_path / "spool")
    assert observe_edits(journal, client, SECRET, read_time=lambda: at(90_000)) == 1
    assert waiting(client)[0]["id"] == "e-1-look-3"


def test_a_clock_that_is_set_moves_no_age_unless_the_machine_was_started_since() -> None:
    made = at(0)
    assert at(400, wall_s=1e9 - 86_400).age_s(made) == 400
    assert at(400, boot_id="c").age_s(made) == 400
    assert at(400, boot_id="c", wall_s=1e9 - 86_400).age_s(made) == 0
    now = read_machine_time()
    assert now.age_s(now) == 0


def test_events_go_to_the_conversation_of_the_edit_and_hold_no_line_of_it(
    tmp_path: Path, journal: EditJournal
) -> None:
    client = make_client(tmp_path / "spool")
    observe_edits(journal, client, SECRET, read_time=lambda: at(301))
    (event,) = waiting(client)
    assert event["subject"] == "c-1"
    assert (event["data"]["rollout"], event["data"]["policyVersion"]) == ("r-1", "1.3")
    stored = b"".join(file.read_bytes() for file in journal.list_files())
    assert b"return a + b" not in stored + json.dumps(event).encode()


def test_without_consent_nothing_is_sent(tmp_path: Path, journal: EditJournal) -> None:
    client = make_client(tmp_path / "spool", granted=False)
    observe_edits(journal, client, SECRET, read_time=lambda: at(301))
    assert waiting(client) == []


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"edit": "e"}', b"\xff", b"[" * 100_000])
def test_a_damaged_edit_is_forgotten_and_the_others_are_looked_at(
    tmp_path: Path, journal: EditJournal, damage: bytes
) -> None:
    client = make_client(tmp_path / "spool")
    (journal.folder / "00000000000001-broken.json").write_bytes(damage)
    assert observe_edits(journal, client, SECRET, read_time=lambda: at(301)) == 1
    assert len(journal.list_files()) == 1


def test_two_agents_do_not_look_at_the_same_time(tmp_path: Path, journal: EditJournal) -> None:
    client = make_client(tmp_path / "spool")
    with journal.lock() as is_held:
        assert is_held
        assert observe_edits(journal, client, SECRET, read_time=lambda: at(301)) == 0
    assert observe_edits(journal, client, SECRET, read_time=lambda: at(301)) == 1


def test_the_oldest_edits_are_forgotten_beyond_a_number(
    tmp_path: Path, file: Path, journal: EditJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_EDITS > 3
    monkeypatch.setattr("etude.agent.interactive.edits.MAX_EDITS", 3)
    for number in range(2, 6):
        journal.add(edit(f"e-{number}", file, at(number)))
    client = make_client(tmp_path / "spool")
    observe_edits(journal, client, SECRET, read_time=lambda: at(400))
    assert [each["data"]["payload"]["edit"] for each in waiting(client)] == ["e-3", "e-4", "e-5"]
