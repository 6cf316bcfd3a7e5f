"""State of a route's releases in its status: which checkpoint serves whom, since when, and why."""

import json
from typing import Any

import pytest

from etude.common.api.kinds import PolicyRoute
from etude.common.api.route.request import ANNOTATION, RouteRequest, identify_request
from etude.common.api.route.status import (
    AnsweredRequest,
    LastDecision,
    PolicyRouteStatus,
    TestedCandidate,
)
from etude.operator.manifests import Ref
from etude.operator.routes.releases import release_figures
from etude.v1 import release_pb2, weights_pb2

KEY = Ref("PolicyRoute", "lab", "coder")
TARGET = "coder-feedback-0.coder-feedback:7091"
ENGINES = {"stable": "2/2", "canary": "1/1"}


def served(number: int) -> release_pb2.ServedPolicyVersion:
    version = weights_pb2.PolicyVersion(epoch=1, number=number)
    return release_pb2.ServedPolicyVersion(
        run_uid="uid-run", version=version, checkpoint=f"demo-s{number:08d}-abcdef"
    )


def decided(action: str, sentence: str, at_ms: int) -> release_pb2.ReleaseDecision:
    return release_pb2.ReleaseDecision(action=action, sentence=sentence, decided_unix_ms=at_ms)


def tested() -> release_pb2.GetReleaseStatusResponse:
    """Version 7 serves, and 1 % of the users try version 9."""
    return release_pb2.GetReleaseStatusResponse(
        policy="Automatic",
        stable=served(7),
        canary=release_pb2.CanaryStatus(
            candidate=served(9), experiment="v9", share=100, started_unix_ms=2_000
        ),
        decisions=[decided("StartCanary", "gate passed: success +1.0 points", 2_000)],
    )


async def figures(lab: Any) -> PolicyRouteStatus:
    await lab.advance(1)
    return PolicyRoute.parse_known_fields(lab.cluster.objects()[KEY]).status


@pytest.fixture
async def route_lab(lab: Any, run_body: Any, route_body: Any) -> Any:
    lab.cluster.upsert(run_body())
    lab.cluster.upsert(route_body())
    await lab.settle()
    return lab


async def test_the_status_says_which_version_serves_whom_and_what_is_tested(route_lab: Any) -> None:
    route_lab.peers.releases[TARGET].append(tested())
    found = await figures(route_lab)
    assert found.stable is not None
    assert found.canary is not None
    assert (found.stable.version, found.stable.checkpoint) == ("1.7", "demo-s00000007-abcdef")
    assert (found.canary.version, found.canary.since) == ("1.9", "1970-01-01T00:00:02Z")
    assert found.test == TestedCandidate(experiment="v9", share="1 %")
    assert found.policy == "Automatic"
    assert found.decision is not None
    assert found.decision.sentence == "gate passed: success +1.0 points"
    # Counts of engines stay beside.
    assert (found.stable.engines, found.canary.engines) == ("2/2", "1/1")


async def test_a_promotion_moves_the_candidate_and_its_time_to_the_stable_channel(
    route_lab: Any,
) -> None:
    route_lab.peers.releases[TARGET].append(tested())
    await figures(route_lab)
    promoted = release_pb2.GetReleaseStatusResponse(
        stable=served(9), previous=served(7), decisions=[decided("Promote", "better", 9_000)]
    )
    route_lab.peers.releases[TARGET].append(promoted)
    found = await figures(route_lab)
    assert found.stable is not None
    assert (found.stable.version, found.stable.since) == ("1.9", "1970-01-01T00:00:09Z")
    assert found.canary is not None
    assert (found.canary.version, found.test) == ("", None)
    # A later decision that changes nothing does not make the version younger.
    refused = release_pb2.GetReleaseStatusResponse()
    refused.CopyFrom(promoted)
    refused.decisions.insert(0, decided("Refuse", "the gate: success -4 points", 20_000))
    route_lab.peers.releases[TARGET].append(refused)
    found = await figures(route_lab)
    assert found.stable is not None
    assert found.stable.since == "1970-01-01T00:00:09Z"
    assert found.decision == LastDecision(
        action="Refuse", sentence="the gate: success -4 points", time="1970-01-01T00:00:20Z"
    )


async def test_what_was_decided_last_is_shown_while_the_feedback_service_is_away(
    route_lab: Any,
) -> None:
    route_lab.peers.releases[TARGET].append(tested())
    before = await figures(route_lab)
    pod = Ref("Pod", "lab", "coder-feedback-0")
    route_lab.cluster.set_status(pod, {"phase": "Pending"})
    found = await figures(route_lab)
    assert (found.stable, found.test, found.decision) == (
        before.stable,
        before.test,
        before.decision,
    )


async def test_a_freeze_is_told_with_its_reason_until_it_ends(route_lab: Any) -> None:
    frozen = tested()
    frozen.freeze = "monitor EndlessQuestions: 12 % of rollouts"
    route_lab.peers.releases[TARGET].append(frozen)
    assert (await figures(route_lab)).freeze == "monitor EndlessQuestions: 12 % of rollouts"
    route_lab.peers.releases[TARGET].append(tested())
    assert (await figures(route_lab)).freeze == ""


def test_whatever_a_service_tells_fits_the_schema() -> None:
    """A status that the API server rejects would hide all others."""
    hostile = tested()
    hostile.policy = "Root"
    hostile.freeze = "x" * 10_000
    hostile.stable.checkpoint = "y" * 10_000
    hostile.canary.share = -5
    hostile.canary.experiment = hostile.canary.question = "z" * 10_000
    hostile.canary.started_unix_ms = -1
    hostile.decisions[0].sentence = hostile.decisions[0].action = "w" * 10_000
    hostile.decisions[0].decided_unix_ms = 2**63 - 1
    figures = release_figures(PolicyRouteStatus(), hostile, ENGINES)
    written = PolicyRouteStatus().model_copy(update=figures).to_json()
    found = PolicyRouteStatus.model_validate(written)
    assert (found.policy, found.test) != ("Root", None)
    assert found.canary is not None
    assert found.canary.since is None


async def ask(lab: Any, route_body: Any, text: str) -> PolicyRouteStatus:
    """A person writes a request into the route's annotation."""
    body = route_body()
    body["metadata"]["annotations"] = {ANNOTATION: text}
    lab.cluster.upsert(body)
    await lab.settle()
    return await figures(lab)


def request(**content: Any) -> str:
    return json.dumps(RouteRequest(**content, key="1").to_json())


async def test_a_request_is_forwarded_once_and_answered_in_the_status(
    route_lab: Any, route_body: Any
) -> None:
    text = request(action="Promote", version="1.9", reason="looks good")
    await ask(route_lab, route_body, text)
    await route_lab.advance(3)
    found = await figures(route_lab)
    (order,) = route_lab.peers.release_orders
    assert order.target == TARGET
    assert order.version == release_pb2.ServedPolicyVersion(
        run_uid="uid-run", version=weights_pb2.PolicyVersion(epoch=1, number=9)
    )
    assert (order.caller.request_id, order.caller.reason) == (identify_request(text), "looks good")
    assert found.request == AnsweredRequest(
        id=identify_request(text), action="Promote", sentence="as asked"
    )
    await route_lab.advance(3600)
    assert len(route_lab.peers.release_orders) == 1


async def test_a_request_waits_for_the_feedback_service(route_lab: Any, route_body: Any) -> None:
    pod = Ref("Pod", "lab", "coder-feedback-0")
    ready = route_lab.cluster.objects()[pod]["status"]
    route_lab.cluster.set_status(pod, {"phase": "Pending"})
    await ask(route_lab, route_body, request(action="Freeze"))
    assert route_lab.peers.release_orders == []
    route_lab.cluster.set_status(pod, ready)
    await route_lab.settle()
    await route_lab.advance(3)
    assert (await figures(route_lab)).request is not None


async def test_an_order_that_got_no_answer_is_repeated_under_the_same_name(
    route_lab: Any, route_body: Any
) -> None:
    text = request(action="Rollback")
    route_lab.peers.unresponsive.add(TARGET)
    assert (await ask(route_lab, route_body, text)).request is None
    await route_lab.kill()
    route_lab.peers.unresponsive.clear()
    await route_lab.advance(3)
    await route_lab.advance(3)
    assert {each.request_id for each in route_lab.peers.release_orders} == {identify_request(text)}
    assert (await figures(route_lab)).request is not None


@pytest.mark.parametrize(
    "text",
    [
        "promote",
        '{"action": "Delete", "key": "1"}',
        '{"action": "Promote", "key": "1", "version": "x"}',
        '{"action": "Promote", "key": "1", "more": 1}',
        '{"action": "Freeze", "key": "1", "reason": "' + "x" * 5_000 + '"}',
    ],
    ids=["no JSON", "unknown action", "no version", "unknown field", "too long"],
)
async def test_what_is_no_request_is_refused_by_the_operator(
    route_lab: Any, route_body: Any, text: str
) -> None:
    found = (await ask(route_lab, route_body, text)).request
    assert found is not None
    assert (found.id, found.action) == (identify_request(text), "Refuse")
    assert "etude.dev/release is no request" in found.sentence
    assert route_lab.peers.release_orders == []
