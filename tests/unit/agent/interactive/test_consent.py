"""Consent to feedback: a decision of the user, without which no event exists."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from etude.agent.interactive.consent import AgentState, StoredConsent
from etude.agent.interactive.gateway_policy import GatewayAddress, GatewayPolicy
from etude.agent.interactive.session import ConversationEvents
from etude.agent.interactive.user_workspace import Decision, make_edit
from etude.agent.toolsets import toolset
from etude.common.errors import UserError

DECISION = StoredConsent(
    service="http://127.0.0.1:1",
    tenant="acme",
    user="u-1",
    terms="2026-11",
    granted=True,
    decided="2026-11-01T08:00:00.000+00:00",
)


@pytest.fixture
def state(tmp_path: Path) -> AgentState:
    return AgentState(tmp_path / "state")


def test_without_a_decision_there_is_no_client_of_events(state: AgentState) -> None:
    assert state.open_client("key") is None
    state.store_consent(replace(DECISION, granted=False))
    assert state.open_client("key") is None
    assert not state.spool.folder.exists()


def test_a_decision_is_read_again_and_is_the_user_s_alone(state: AgentState) -> None:
    state.store_consent(DECISION)
    client = state.open_client("key")
    assert client is not None
    assert client.consent is not None
    assert client.consent.granted
    assert state.read_consent() == DECISION
    assert (state.folder / "consent.json").stat().st_mode & 0o077 == 0
    assert state.folder.stat().st_mode & 0o077 == 0


WORDS = json.dumps(asdict(DECISION) | {"granted": "false"}).encode()


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"\xff", b'{"granted": true}', WORDS])
def test_a_damaged_decision_is_none(state: AgentState, damage: bytes) -> None:
    state.folder.mkdir()
    (state.folder / "consent.json").write_bytes(damage)
    with pytest.raises(UserError, match="holds no decision"):
        state.open_client("key")


def test_a_consent_that_is_taken_back_stays_so_though_the_service_is_away(
    state: AgentState,
) -> None:
    state.store_consent(DECISION)
    with pytest.raises(OSError, match="refused"):
        state.revoke("key", at="2026-11-02T08:00:00.000+00:00")
    assert state.open_client("key") is None
    with pytest.raises(OSError, match="refused"):
        state.revoke("key", at="2026-11-02T08:00:00.000+00:00")


def test_the_key_goes_to_no_service_in_the_clear(state: AgentState) -> None:
    state.store_consent(replace(DECISION, service="http://feedback.example.com"))
    with pytest.raises(UserError, match="https"):
        state.open_client("key")


def test_the_secret_of_hashes_is_made_once(state: AgentState) -> None:
    assert state.read_secret() == AgentState(state.folder).read_secret()
    assert [file.name for file in state.folder.iterdir()] == ["secret"]
    assert (state.folder / "secret").stat().st_mode & 0o077 == 0


def test_a_conversation_that_goes_on_collects_nothing_more_once_consent_is_taken_back(
    state: AgentState, tmp_path: Path
) -> None:
    state.store_consent(DECISION)
    address = GatewayAddress(url="http://127.0.0.1:1", model="m", key="key")
    policy = GatewayPolicy(address, toolset("Standard"), "Xml", 10)
    events = ConversationEvents(state.open_client("key"), state, tmp_path, policy)
    events.add("shown")
    assert state.spool.read_counts().waiting_bytes > 0
    with pytest.raises(OSError, match="refused"):
        AgentState(state.folder).revoke("key", at="2026-11-02T08:00:00.000+00:00")
    events.add("shown")
    events.note_edit(make_edit("a.py", None, b"x = 1\n"), Decision.ACCEPTED)
    policy.num_turns = 1
    events.close("Closed")
    assert state.spool.read_counts().waiting_bytes == 0
    assert state.journal.list_files() == []
    assert events.open_client() is None
