"""The rights of the operator's account against what it does, by the API server's own log.

Every pod that comes of the chart and of our objects stands before a namespace that enforces
restricted Pod Security, hosts with VMs before one that admits privileged pods.
"""

import json
import random
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.mutations import process, produced, rights, walls
from tests.harness.mutations.api import Api
from tests.harness.mutations.life import Life
from tests.harness.mutations.process import HOME
from tests.harness.mutations.rights import FORBIDDEN, Right
from tests.support import figures
from tests.support.chart import helm
from tests.support.chart.helm import ROOT
from tests.support.chart.renders import renders
from tests.support.kube import testbeds

ACCOUNT = f"system:serviceaccount:{HOME}:etude-operator"
CHANGED = (
    ("", "services"),
    ("policy", "poddisruptionbudgets"),
)
"""Children that no field of a run or a pool changes while they are there."""
UNSEEN: dict[Right, str] = {
    Right("etude.dev", f"{plural}/finalizers", "update"): (
        "OwnerReferencesPermissionEnforcement asks for it inside another request"
    )
    for plural in ("rlruns", "envpools", "policyroutes", "evalruns")
}
UNSEEN |= {
    Right(group, plural, "get"): "whose an object is, of a name that is taken"
    for group, plural in (*CHANGED, ("", "pods"), ("batch", "jobs"))
}
UNSEEN |= {
    Right(group, plural, "patch"): "another release may render it otherwise"
    for group, plural in CHANGED
}
UNSEEN |= {
    Right("etude.dev", "evalruns", verb): "a route asks once its service of feedback has reported"
    for verb in ("get", "create", "patch", "delete")
}
"""Rights that no request of the log shows, each with the reason to have it."""
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.fixture(scope="module")
def audited() -> Iterator[Mapping[str, Any]]:
    """A control plane that writes down what the operator's account asks for, with the chart."""
    for state in testbeds.cluster("apiserver", audited=ACCOUNT):
        process.install(state)
        yield state


@pytest.fixture(scope="module")
def api(audited: Mapping[str, Any]) -> Api:
    return Api(audited)


@pytest.fixture
def namespace(api: Api) -> str:
    name = f"test-{uuid.uuid4().hex[:8]}"
    body = json.dumps({"metadata": {"name": name}})
    assert api.call("POST", "/api/v1/namespaces", body).is_good
    return name


def roles(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    kubectl = testbeds.program(state, "kubectl")
    whole = json.loads(kubectl("get", "clusterrole", f"etude-operator.{HOME}", "-o", "json"))
    leader = json.loads(kubectl("-n", HOME, "get", "role", "etude-operator-leader", "-o", "json"))
    return [whole, leader]


def test_a_life_of_every_kind_uses_each_right_and_lacks_none(
    audited: Mapping[str, Any], api: Api, namespace: str, tmp_path: Path
) -> None:
    address = f"127.{random.randint(2, 250)}.{random.randint(1, 250)}.1"
    with process.running(audited, tmp_path) as operator:
        for part in ("checkpoint", "pool", "run", "route", "evaluation"):
            own = f"{namespace}-{part}"
            assert api.call(
                "POST", "/api/v1/namespaces", json.dumps({"metadata": {"name": own}})
            ).is_good
            getattr(Life(api, own, address), part)()
        assert operator.troubles == []
    log = Path(audited["audit_log"])
    used, granted = rights.used(log), rights.granted(roles(audited))
    unused = {str(each) for each in granted - used - set(UNSEEN)}
    missing = {str(each) for each in used - granted}
    figures.record("faults", rbac_unused=sorted(unused), rbac_missing=sorted(missing))
    assert rights.refused(log) == []
    assert (unused, missing) == (set(), set())
    assert set(UNSEEN) <= granted - used, "the list of what cannot be seen is longer than needed"


def test_what_the_operator_has_no_business_with_is_forbidden(api: Api) -> None:
    allowed = []
    for verb, path in FORBIDDEN:
        reply = api.call(verb, path, None if verb == "GET" else "{}", as_user=ACCOUNT)
        if reply.status != 403:
            allowed.append(f"{verb} {path}: {reply.status} {reply.message[:200]}")
    figures.record("faults", forbidden_calls=len(FORBIDDEN), forbidden_allowed=len(allowed))
    assert len(FORBIDDEN) >= 50
    assert allowed == []


# Helm renders the chart a hundred times: half a minute, and more on a busy machine.
@pytest.mark.timeout(1_800)
def test_every_pod_of_the_chart_and_of_our_objects_is_admitted_where_restricted_is_enforced(
    api: Api,
) -> None:
    home = f"walls-{uuid.uuid4().hex[:8]}"
    walls.make_namespace(api, home, "restricted")
    charts = {
        json.dumps(template): manifest
        for render in renders()
        for manifest in helm.rendered(render.values, *render.words).manifests
        for _, template in walls.pods([manifest])
    }
    examples = [
        each
        for path in EXAMPLES
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if isinstance(each, dict) and each.get("apiVersion") == "etude.dev/v1alpha1"
    ]
    children = produced.made([*examples, *produced.bodies(seed=0)])
    hosts = [each for each in charts.values() if each["kind"] == "DaemonSet"]
    asked = [each for each in (*charts.values(), *children) if each["kind"] != "DaemonSet"]
    walls.make_namespace(api, f"{home}-hosts", "privileged")
    refusals = list[str]()
    for space, manifests in ((home, asked), (f"{home}-hosts", hosts)):
        walls.provide(api, space, manifests)
        refusals += walls.refusals(api, space, manifests)
    figures.record(
        "faults",
        pods_admitted=len(asked) - len(refusals),
        pods_refused=len(refusals),
        pods_of_the_chart=len(charts),
    )
    assert refusals == []
    assert len(children) > 20
    assert {each["metadata"]["namespace"] for each in hosts} == {"vms", "other"}


def test_a_pod_that_is_not_restricted_is_found(api: Api) -> None:
    home = f"walls-{uuid.uuid4().hex[:8]}"
    walls.make_namespace(api, home, "restricted")
    pod = {"kind": "Pod", "metadata": {"name": "a"}}
    weak = pod | {"spec": {"containers": [{"name": "a", "image": "a"}]}}
    walls.provide(api, home, [weak])
    (why,) = walls.refusals(api, home, [weak])
    assert "violates PodSecurity" in why


def test_a_line_that_an_api_server_is_writing_is_not_read_yet(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    event = {"verb": "get", "objectRef": {"resource": "pods"}, "stage": "ResponseComplete"}
    whole = json.dumps(event)
    log.write_text(f"{whole}\n{whole[:20]}", encoding="utf-8")
    assert rights.used(log) == {rights.Right("", "pods", "get")}
