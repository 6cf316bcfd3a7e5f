"""A way in to the policy, with the Gateway API's CRD; what serves routes is the platform's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

GATEWAY = {"name": "public", "namespace": "gateways", "hostnames": ["policy.example.com"]}
SLOW = {**GATEWAY, "requestTimeoutSeconds": 0}


def test_a_policy_is_routed_to_once_there_is_a_gateway_api(
    lab: Any, operator: Path, installed: Callable[[str], None]
) -> None:
    assert operator.exists()
    engines = {"replicas": 2, "gateway": SLOW}
    lab.run(roles={"trainer": {}, "inference": engines})
    lab.until("refusal", lambda: lab.condition("Accepted") == ("False", "GatewayAPINotInstalled"))
    installed("gateway-api")
    lab.until("the route", lambda: lab.names("httproutes") == ["demo-policy"])
    # A condition is written once it has held for a second: after the children that follow from it.
    lab.until("acceptance", lambda: lab.condition("Accepted") == ("True", "Accepted"))
    spec = lab.get("httproutes", "demo-policy")["spec"]
    assert spec["hostnames"] == ["policy.example.com"]
    (parent,) = spec["parentRefs"]
    assert (parent["name"], parent["namespace"]) == ("public", "gateways")
    ((backend,),) = (rule["backendRefs"] for rule in spec["rules"])
    assert [rule["timeouts"] for rule in spec["rules"]] == [{"request": "0s"}]
    service = lab.get("services", "demo-policy")["spec"]
    assert (backend["name"], backend["port"]) == ("demo-policy", service["ports"][0]["port"])
    assert service["selector"]["etude.dev/role"] == "inference"
    lab.patch("rlr", "demo", suspend=True)
    lab.until("suspension", lambda: lab.condition("Suspended") == ("True", "ByUser"))
    lab.patch("rlr", "demo", suspend=False, roles={"inference": {"gateway": None}})
    lab.until("no route", lambda: lab.names("httproutes") == [])
    assert "demo-policy" not in lab.names("services")
