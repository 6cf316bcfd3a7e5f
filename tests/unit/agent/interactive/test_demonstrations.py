"""Demonstrations: what a user keeps of edited files, sent with a consent of its own alone."""

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from etude.agent.interactive import demonstrations
from etude.agent.interactive.consent import AgentState, StoredConsent
from etude.agent.interactive.demonstrations import (
    AGE_S,
    MAX_CHARS,
    EditedSession,
)
from etude.agent.interactive.edits import MachineTime
from etude.agent.interactive.gateway_policy import GatewayAddress, GatewayPolicy
from etude.agent.interactive.session import ConversationEvents
from etude.agent.interactive.user_workspace import Decision, make_edit
from etude.agent.toolsets import toolset
from etude.common.feedback.client import EventContext

DECISION = StoredConsent(
    service="http://127.0.0.1:1",
    tenant="t",
    user="u",
    terms="v",
    granted=True,
    decided="2026-11-01T08:00:00.000+00:00",
    demonstrations=True,
)


@pytest.fixture
def home(tmp_path: Path) -> AgentState:
    home = AgentState(tmp_path / "state")
    home.store_consent(DECISION)
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "a.py").write_text("policy\n")
    return folder


def make_session(folder: Path, name: str = "rollout", *, age_s: float = AGE_S) -> EditedSession:
    made = MachineTime("", 0.0, time.time() - age_s)
    return EditedSession(str(folder), EventContext("subject", name), 3, made)


def observe(home: AgentState) -> list[dict[str, object]]:
    """Payloads of the demonstrations that wait, after a look."""
    client = home.open_client("key")
    assert client is not None
    home.observe(client)
    lines = home.spool.read_batch(max_events=99, max_bytes=1 << 24).lines
    events = [json.loads(line) for line in lines]
    return [e["data"]["payload"] for e in events if ".demonstration." in e["type"]]


def test_a_day_later_git_makes_of_the_first_files_what_the_user_kept(
    home: AgentState, folder: Path, tmp_path: Path
) -> None:
    session = make_session(folder)
    home.demonstrations.note_edit(session, "a.py", b"first\n")
    home.demonstrations.note_edit(session, "a.py", b"between\n")
    home.demonstrations.note_edit(session, "gone.py", None)
    home.demonstrations.note_edit(session, "b.py", b"deleted\n")
    (folder / "a.py").write_text("of the user\n")
    (payload,) = observe(home)
    assert payload["turn"] == 3
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/a.py").write_text("first\n")
    (tmp_path / "copy/b.py").write_text("deleted\n")
    patch = str(payload["text"]).encode()
    subprocess.run(["git", "apply", "-"], cwd=tmp_path / "copy", input=patch, check=True)
    left = {path.name: path.read_text() for path in (tmp_path / "copy").iterdir()}
    assert left == {"a.py": "of the user\n"}
    assert len(observe(home)) == 1


@pytest.mark.parametrize("content", [b"policy\n", b"\xff\xfe", b"x\n" * MAX_CHARS])
def test_what_was_not_changed_is_no_text_or_is_too_long_is_not_sent(
    home: AgentState, folder: Path, content: bytes
) -> None:
    home.demonstrations.note_edit(make_session(folder), "a.py", content)
    home.demonstrations.note_edit(make_session(folder / "none", "other"), "a.py", b"x")
    assert observe(home) == []
    assert [*home.demonstrations.folder.iterdir()] == []


def test_sessions_wait_for_a_day_and_the_oldest_of_many_are_forgotten(
    home: AgentState, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstrations, "MAX_SESSIONS", 3)
    for number in range(5):
        session = make_session(folder, f"r{number}", age_s=AGE_S - 60)
        home.demonstrations.note_edit(session, "a.py", b"first\n")
    assert observe(home) == []
    assert len([*home.demonstrations.folder.iterdir()]) == 3


@pytest.mark.parametrize("consent", [True, False])
def test_an_edit_is_remembered_with_the_consent_of_its_own_alone_until_it_is_taken_back(
    home: AgentState, folder: Path, *, consent: bool
) -> None:
    home.store_consent(replace(DECISION, demonstrations=consent))
    address = GatewayAddress(url="http://127.0.0.1:1", model="m", key="key")
    policy = GatewayPolicy(address, toolset("Standard"), "Xml", 10)
    events = ConversationEvents(home.open_client("key"), home, folder, policy)
    events.note_edit(make_edit("a.py", b"first\n", b"policy\n"), Decision.REJECTED)
    assert [*home.demonstrations.folder.glob("*")] == []
    events.note_edit(make_edit("a.py", b"first\n", b"policy\n"), Decision.ACCEPTED)
    assert len([*home.demonstrations.folder.glob("*")]) == consent
    home.store_consent(replace(DECISION, demonstrations=False))
    assert [*home.demonstrations.folder.glob("*")] == []


def test_a_damaged_record_is_forgotten(home: AgentState, folder: Path) -> None:
    home.demonstrations.note_edit(make_session(folder), "a.py", b"first\n")
    (file,) = home.demonstrations.folder.iterdir()
    file.write_text('[["x", [], 1, []], {}]')
    assert observe(home) == []
    assert not file.exists()
