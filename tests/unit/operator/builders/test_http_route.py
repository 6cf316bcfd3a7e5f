"""HTTPRoute of a Gateway: route, Service, and the policy that admits its proxies."""

from dataclasses import replace
from typing import Any

import pytest

from etude.common.api.kinds import RLRun
from etude.operator.builders import run as desired
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape
from etude.operator.manifests import Manifest, Ref

GATEWAY = {"name": "public", "namespace": "edge", "sectionName": "https", "hostnames": ["a.org"]}


@pytest.fixture
def platform(platform: Platform) -> Platform:
    return replace(platform, integrations=frozenset({"gatewayApi"}))


def with_gateway(run_body: Any, **gateway: Any) -> Manifest:
    body: Manifest = run_body()
    body["spec"]["roles"]["inference"]["gateway"] = {**GATEWAY, **gateway}
    return body


def child(body: Manifest, platform: Platform, kind: str, name: str) -> Manifest:
    shape = RunShape(images=platform.images)
    made = desired.run_children(RLRun.model_validate(body), shape, platform)
    (found,) = (m for m in made if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return found


def test_the_route_leads_from_the_gateway_to_engines_that_are_ready(
    run_body: Any, platform: Platform
) -> None:
    body = with_gateway(run_body)
    route = child(body, platform, "HTTPRoute", "demo-policy")["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "edge", "sectionName": "https"}]
    assert route["hostnames"] == ["a.org"]
    assert route["rules"] == [{"backendRefs": [{"name": "demo-policy", "port": 7011}]}]
    service = child(body, platform, "Service", "demo-policy")["spec"]
    assert service["selector"] == {
        "app.kubernetes.io/managed-by": "etude",
        "etude.dev/run": "demo",
        "etude.dev/role": "inference",
    }
    assert "publishNotReadyAddresses" not in service


@pytest.mark.parametrize(
    ("given", "timeouts"),
    [
        ({}, None),
        ({"requestTimeoutSeconds": 0}, {"request": "0s"}),
        ({"requestTimeoutSeconds": 86_400}, {"request": "86400s"}),
    ],
)
def test_the_route_says_how_long_a_request_may_take_only_if_the_run_does(
    given: dict[str, Any], timeouts: dict[str, str] | None, run_body: Any, platform: Platform
) -> None:
    """A field that older CRDs and simpler gateways do not know would cost the whole route."""
    route = child(with_gateway(run_body, **given), platform, "HTTPRoute", "demo-policy")
    (rule,) = route["spec"]["rules"]
    assert rule.get("timeouts") == timeouts


@pytest.mark.parametrize(
    ("given", "namespace"),
    [({}, "edge"), ({"namespace": None}, "lab"), ({"proxyNamespace": "envoy"}, "envoy")],
)
def test_only_the_namespace_of_its_proxies_is_let_in(
    given: dict[str, Any], namespace: str, run_body: Any, platform: Platform
) -> None:
    body = with_gateway(run_body, **given)
    ingress = child(body, platform, "NetworkPolicy", "demo-inference")["spec"]["ingress"]
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    assert {"from": [peer], "ports": [{"port": 7011, "protocol": "TCP"}]} in ingress
    without = child(run_body(), platform, "NetworkPolicy", "demo-inference")["spec"]["ingress"]
    assert len(without) == len(ingress) - 1


async def test_a_gateway_api_that_is_taken_away_stops_nothing_else(lab: Any, run_body: Any) -> None:
    lab.cluster.integrations = frozenset({"HTTPRoute"})
    lab.cluster.upsert(with_gateway(run_body))
    await lab.settle()
    assert lab.names("HTTPRoute") == ["demo-policy"]
    lab.cluster.integrations = frozenset()
    body = with_gateway(run_body)
    lab.cluster.upsert({**body, "spec": {**body["spec"], "suspend": True}})
    await lab.settle()
    await lab.advance(60)
    assert lab.condition("Accepted") == ("False", "GatewayAPINotInstalled")
    assert lab.condition("Suspended") == ("True", "ByUser")
    assert lab.cluster.objects()[Ref("StatefulSet", "lab", "demo-trainer")]["spec"]["replicas"] == 0


@pytest.mark.parametrize("enabled", [frozenset(), frozenset({"kueue"})])
async def test_what_the_chart_does_not_enable_is_refused_by_its_value(
    enabled: frozenset[str], lab: Any, run_body: Any
) -> None:
    lab.cluster.integrations = frozenset({"HTTPRoute"})
    lab.platform = lab.reconciler.platform = replace(lab.platform, integrations=enabled)
    lab.cluster.upsert(with_gateway(run_body))
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "FeatureDisabled")
    (accepted,) = (c for c in lab.run().status.conditions if c.type == "Accepted")
    assert "spec.roles.inference.gateway" in accepted.message
    assert "integrations.gatewayApi.enabled" in accepted.message
    assert lab.names("Service") == []
