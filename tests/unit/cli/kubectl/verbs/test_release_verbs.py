"""Requests about a route's releases by the plugin, as the operator reads them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.kube.stub_kubectl import StubKubectl, shown

from etude.cli.kubectl.verbs import release
from etude.common.api.route.request import RouteRequest, identify_request

KEY = "5f" * 8


def annotation(**content: Any) -> str:
    request = RouteRequest(**content, key=KEY)
    return json.dumps(request.to_json(), sort_keys=True)


@pytest.fixture
def answered(
    stub: StubKubectl, etude: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Call a verb whose request, that of these words, gets an answer."""
    monkeypatch.setattr("secrets.token_hex", lambda _: KEY)
    monkeypatch.setattr(release, "INTERVAL_S", 0.0)

    def call(text: str, action: str, *words: str) -> Any:
        request = {"id": identify_request(text), "action": action, "sentence": "because"}
        old = {"status": {"request": {**request, "id": "an earlier one"}}}
        stub.teach("patch policyroutes.etude.dev coder", shown({}))
        stub.teach(
            "get policyroutes.etude.dev coder", shown(old), shown({"status": {"request": request}})
        )
        told = etude(*words)
        return told, stub.patches()

    return call


@pytest.mark.parametrize(
    ("words", "content"),
    [
        (
            ["propose", "coder", "--evalrun", "coder-v9-0a1b2c3d"],
            {"action": "Propose", "evaluation": "coder-v9-0a1b2c3d"},
        ),
        (["promote", "coder"], {"action": "Promote"}),
        (
            ["promote", "coder", "--version", "1.42", "--without-gate"],
            {"action": "Promote", "version": "1.42", "without_gate": True},
        ),
        (["rollback", "coder", "--reason", "slow"], {"action": "Rollback", "reason": "slow"}),
        (["freeze", "coder"], {"action": "Freeze"}),
        (["unfreeze", "coder"], {"action": "Unfreeze"}),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_verb_writes_a_request_and_prints_the_answer_to_it(
    answered: Callable[..., Any], words: list[str], content: dict[str, Any]
) -> None:
    told, (patch,) = answered(annotation(**content), content["action"], *words)
    assert told.code == 0
    assert f"coder: {content['action']}: because" in told.err
    written = patch["metadata"]["annotations"]["etude.dev/release"]
    assert RouteRequest.parse(written) == RouteRequest(**content, key=KEY)


def test_a_request_that_changes_nothing_fails_with_the_reason(answered: Callable[..., Any]) -> None:
    told, _ = answered(annotation(action="Promote"), "Refuse", "promote", "coder")
    assert told.code != 0
    assert "because" in told.err


def test_a_version_of_another_form_is_refused_by_its_option(etude: Callable[..., Any]) -> None:
    told = etude("promote", "coder", "--version", "newest")
    assert told.code != 0
    assert "--version" in told.err


def test_without_an_answer_the_request_stands(
    stub: StubKubectl, etude: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "INTERVAL_S", 0.0)
    stub.teach("patch policyroutes.etude.dev coder", shown({}))
    stub.teach("get policyroutes.etude.dev coder", shown({}))
    told = etude("freeze", "coder", "--timeout", "1")
    assert told.code != 0
    assert "the request stands" in told.err
