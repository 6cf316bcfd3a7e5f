"""NetworkPolicies, checked by an evaluator that is independent of the operator."""

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from etude.common.api.kinds import EnvPool, PolicyRoute, RLRun
from etude.common.api.storage import Storage
from etude.operator.builders import network_policies
from etude.operator.builders import pool as desired_pools
from etude.operator.builders import run as desired
from etude.operator.builders.platform import Platform
from etude.operator.builders.route import route_children
from etude.operator.builders.run import RunShape
from etude.operator.manifests import Manifest

Build = Callable[..., dict[str, Any]]
GRPC = {"trainer": 7000, "inference": 7010, "broker": 7020, "node": 7030, "rewards": 7040}


class Pod(NamedTuple):
    """An end of a connection."""

    labels: Mapping[str, str]
    namespace: str = "lab"


OPERATOR = Pod(
    {"app.kubernetes.io/name": "etude", "app.kubernetes.io/component": "operator"}, "etude-system"
)
STRANGER = Pod({"app": "stranger"})


@pytest.fixture
def policies(run_body: Build, platform: Platform) -> list[Manifest]:
    """Those of two runs, the pool of the first, and a pool with an edge that both may name."""
    first, second = run_body(), run_body()
    second["metadata"] = {**second["metadata"], "name": "other", "uid": "uid-other"}
    found: list[Manifest] = []
    for body in (first, second):
        run = RLRun.model_validate(body)
        children = desired.run_children(run, RunShape(images=platform.images), platform)
        found += children
        for child in children:
            if child["kind"] == "EnvPool":
                child["metadata"]["uid"] = "uid-pool"
                pool = EnvPool.model_validate(child)
                found += desired_pools.pool_children(pool, (0,), platform.images, platform)
    return [m for m in found if m["kind"] == "NetworkPolicy"]


def role(name: str, run: str = "demo") -> Pod:
    return Pod({"etude.dev/run": run, "etude.dev/role": name})


def part(name: str, run: str = "demo") -> Pod:
    labels = {"etude.dev/pool": f"{run}-repos", "etude.dev/run": run, "etude.dev/role": name}
    return Pod(labels)


def reaches(policies: list[Manifest], caller: Pod, callee: Pod | str, port: int) -> bool:
    """What Kubernetes says: policies that select a pod add up, and without any all is open."""
    out = sides(policies, caller, "egress", callee, port)
    if isinstance(callee, str):
        return out
    return out and sides(policies, callee, "ingress", caller, port)


def sides(policies: list[Manifest], pod: Pod, way: str, other: Pod | str, port: int) -> bool:
    mine = [p for p in policies if selects(p["spec"]["podSelector"], pod) and is_at(p, pod)]
    rules = [rule for policy in mine for rule in policy["spec"].get(way, ())]
    return not mine or any(
        allows_port(rule, port) and allows_peer(rule, "to" if way == "egress" else "from", other)
        for rule in rules
    )


def is_at(policy: Manifest, pod: Pod) -> bool:
    return bool(policy["metadata"]["namespace"] == pod.namespace)


def allows_port(rule: Manifest, port: int) -> bool:
    return "ports" not in rule or any(each["port"] == port for each in rule["ports"])


def allows_peer(rule: Manifest, side: str, other: Pod | str) -> bool:
    return side not in rule or any(is_peer(peer, other) for peer in rule[side])


def is_peer(peer: Manifest, other: Pod | str) -> bool:
    if "ipBlock" in peer:
        return isinstance(other, str) and is_in(peer["ipBlock"], other)
    if isinstance(other, str) or not selects(peer.get("podSelector", {}), other):
        return False
    spaces = peer.get("namespaceSelector")
    names = {"kubernetes.io/metadata.name": other.namespace}
    return other.namespace == "lab" if spaces is None else selects(spaces, Pod(names))


def is_in(block: Manifest, address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return ip in ipaddress.ip_network(block["cidr"]) and not any(
        ip in ipaddress.ip_network(each) for each in block.get("except", ())
    )


def selects(selector: Manifest, pod: Pod) -> bool:
    return bool(selector.get("matchLabels", {}).items() <= dict(pod.labels).items())


def everyone(run: str = "demo") -> Iterator[tuple[str, Pod]]:
    for name in ("trainer", "inference", "rewards"):
        yield name, role(name, run)
    for name in ("broker", "node"):
        yield name, part(name, run)


WANTED = {
    *(("trainer", to) for to in ("inference", "rewards", "broker", "node")),
    *(("rewards", to) for to in ("broker", "node")),
    *(("broker", "node"), ("node", "broker")),
}


def test_of_all_pairs_only_those_that_work_together_reach_each_other(
    policies: list[Manifest],
) -> None:
    found = {
        (caller, callee)
        for caller, one in everyone()
        for callee, other in everyone()
        if caller != callee and reaches(policies, one, other, GRPC[callee])
    }
    assert found == WANTED


def test_runs_do_not_reach_each_other(policies: list[Manifest]) -> None:
    for _, one in everyone():
        for callee, other in everyone("other"):
            assert not reaches(policies, one, other, GRPC[callee]), (one, other)


def test_the_operator_dials_controllers_and_brokers_alone(policies: list[Manifest]) -> None:
    for name, pod in everyone():
        assert reaches(policies, OPERATOR, pod, GRPC[name]) == (name in {"trainer", "broker"})
        assert not reaches(policies, OPERATOR._replace(namespace="lab"), pod, GRPC[name])


def test_strangers_see_probes_and_nothing_else(policies: list[Manifest]) -> None:
    for name, pod in everyone():
        assert reaches(policies, STRANGER, pod, 8080)
        assert not reaches(policies, STRANGER, pod, GRPC[name])


def test_only_names_and_the_store_are_reached_outside(policies: list[Manifest]) -> None:
    for name, pod in everyone():
        assert reaches(policies, pod, "10.96.0.10", 53)
        assert reaches(policies, pod, "52.216.1.1", 443) == (name != "broker")
        assert not reaches(policies, pod, "52.216.1.1", 22)


@pytest.mark.parametrize("port", [80, 443])
@pytest.mark.parametrize("address", ["169.254.169.254", "fd00:ec2::254", "fe80::1"])
def test_a_clouds_metadata_is_reached_by_nobody(
    policies: list[Manifest], address: str, port: int
) -> None:
    for _, pod in (*everyone(), ("janitor", JANITOR)):
        assert not reaches(policies, pod, address, port)


def test_a_store_may_have_an_address_of_either_family(policies: list[Manifest]) -> None:
    for address in ("52.216.1.1", "2600:1f18::1"):
        assert reaches(policies, role("trainer"), address, 443)
        assert not reaches(policies, role("trainer"), address, 22)


JANITOR = Pod({"etude.dev/saved-by": "demo", "etude.dev/role": "janitor"})


def test_the_jobs_of_checkpoints_reach_the_store_and_nobody_reaches_them(
    policies: list[Manifest],
) -> None:
    assert reaches(policies, JANITOR, "52.216.1.1", 443)
    assert reaches(policies, JANITOR, "10.96.0.10", 53)
    assert not reaches(policies, JANITOR, "52.216.1.1", 22)
    for name, pod in everyone():
        assert not reaches(policies, JANITOR, pod, GRPC[name])
        assert not reaches(policies, pod, JANITOR, 443)


def test_a_job_that_outlives_its_run_has_a_way_out_of_its_own() -> None:
    labels = {
        "app.kubernetes.io/managed-by": "etude",
        "etude.dev/checkpoint": "demo-s1",
        "etude.dev/saved-by": "demo",
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "demo-s1-del", "namespace": "lab", "uid": "u", "labels": labels},
        "spec": {"template": {"metadata": {"labels": {**labels, "etude.dev/role": "janitor"}}}},
    }
    storage = Storage(uri="s3://runs/demo", endpoint="http://minio.store:9000")
    policies = [network_policies.job_policy(job, storage)]
    pod = Pod({**labels, "etude.dev/role": "janitor"})
    assert reaches(policies, pod, "10.1.2.3", 9000)
    assert not reaches(policies, pod, "10.1.2.3", 443)
    assert not reaches(policies, STRANGER, pod, 443)


def children(body: dict[str, Any], platform: Platform) -> list[Manifest]:
    run = RLRun.model_validate(body)
    return desired.run_children(run, RunShape(images=platform.images), platform)


def test_a_store_and_a_collector_are_reached_on_their_own_ports(
    run_body: Build, platform: Platform
) -> None:
    storage = {"uri": "s3://runs/demo", "endpoint": "http://minio.store:9000"}
    signals = {"otlpEndpoint": "http://collector.monitoring:4317"}
    found = children(run_body(storage=storage, observability=signals), platform)
    policies = [m for m in found if m["kind"] == "NetworkPolicy"]
    for port, is_reached in ((9000, True), (4317, True), (443, False)):
        assert reaches(policies, role("inference"), "10.1.2.3", port) == is_reached


@pytest.mark.parametrize(
    ("host", "namespace"),
    [
        ("minio", "lab"),
        ("minio.store", "store"),
        ("rook.store.svc", "store"),
        ("rook.store.svc.cluster.local", "store"),
        ("rook.store.svc.cluster.local.", "store"),
    ],
)
def test_a_store_of_the_cluster_is_reached_whatever_port_its_service_maps_to(
    run_body: Build, platform: Platform, host: str, namespace: str
) -> None:
    storage = {"uri": "s3://runs/demo", "endpoint": f"http://{host}:80"}
    first, second = run_body(storage=storage), run_body(storage=storage)
    second["metadata"] = {**second["metadata"], "name": "other", "uid": "uid-other"}
    found = [*children(first, platform), *children(second, platform)]
    policies = [m for m in found if m["kind"] == "NetworkPolicy"]
    for space in ("lab", "store", "other"):
        store = Pod({"app": "store"}, space)
        assert reaches(policies, role("trainer"), store, 8080) == (space == namespace)
    assert not reaches(policies, role("trainer"), role("trainer", "other"), GRPC["trainer"])


@pytest.mark.parametrize("host", ["s3.eu.example.com", "10.1.2.3", "[fd00::1]", "a.-b", "x.y.svcs"])
def test_a_store_that_no_service_can_be_opens_no_namespace(
    run_body: Build, platform: Platform, host: str
) -> None:
    storage = {"uri": "s3://runs/demo", "endpoint": f"http://{host}:9000"}
    found = children(run_body(storage=storage), platform)
    ways = [way for m in found if m["kind"] == "NetworkPolicy" for way in m["spec"]["egress"]]
    peers = [peer for way in ways for peer in way.get("to", ())]
    assert not [peer for peer in peers if set(peer) == {"namespaceSelector"}]
    assert {"podSelector": {}} not in peers


def test_a_collector_without_a_port_is_dialled_where_grpc_looks_for_it(
    run_body: Build, platform: Platform
) -> None:
    signals = {"otlpEndpoint": "http://collector.example.com"}
    found = children(run_body(observability=signals), platform)
    policies = [m for m in found if m["kind"] == "NetworkPolicy"]
    assert reaches(policies, role("inference"), "10.1.2.3", 443)
    assert not reaches(policies, role("inference"), "10.1.2.3", 80)


def pool_of(platform: Platform, **spec: Any) -> list[Manifest]:
    body = {"templates": [{"name": "python"}], "isolation": {"minimum": "Process"}, **spec}
    metadata = {"name": "demo-repos", "namespace": "lab", "uid": "uid-pool"}
    pool = EnvPool.model_validate({"metadata": metadata, "spec": body})
    return desired_pools.pool_children(pool, (0,), platform.images, platform)


def test_environments_with_a_way_out_have_it_and_no_metadata(platform: Platform) -> None:
    found = pool_of(platform, network={"egress": "Public"})
    policies = [m for m in found if m["kind"] == "NetworkPolicy"]
    assert reaches(policies, part("node"), "151.101.0.223", 443)
    assert not reaches(policies, part("node"), "169.254.169.254", 80)


def test_an_edge_is_open_to_all_and_reaches_its_pool(platform: Platform) -> None:
    found = pool_of(platform, edge={"keysRef": {"name": "keys"}})
    policies = [m for m in found if m["kind"] == "NetworkPolicy"]
    assert reaches(policies, STRANGER, part("edge"), 7050)
    for name in ("broker", "node"):
        assert reaches(policies, part("edge"), part(name), GRPC[name])


@pytest.mark.parametrize("is_lent", [True, False])
def test_a_runs_trainer_reaches_the_engines_that_its_route_may_lend(
    run_body: Build, route_body: Build, platform: Platform, *, is_lent: bool
) -> None:
    run = RLRun.model_validate(run_body())
    channels = {"stable": {"replicas": 2}, "canary": {}}
    if is_lent:
        channels["lending"] = {"turnsPerEngine": 8}
    route = PolicyRoute.model_validate(route_body(channels=channels))
    found = [
        *desired.run_children(run, RunShape(images=platform.images), platform),
        *route_children(route, run, platform.images, platform),
    ]
    policies = [m for m in found if m["kind"] == "NetworkPolicy"]
    for channel in ("stable", "canary"):
        engine = Pod({"etude.dev/route": "coder", "etude.dev/role": channel})
        is_open = is_lent and channel == "stable"
        assert reaches(policies, role("trainer"), engine, GRPC["inference"]) == is_open
        assert not reaches(policies, role("trainer", "other"), engine, GRPC["inference"])
        assert not reaches(policies, role("rewards"), engine, GRPC["inference"])


def test_hosts_reach_the_code_search_service_that_their_pool_names(platform: Platform) -> None:
    named = {"search": {"service": "http://search.team:7070"}}
    for spec, name, is_reached in (
        (named, "node", True),
        (named, "broker", False),
        ({}, "node", False),
    ):
        policies = [m for m in pool_of(platform, **spec) if m["kind"] == "NetworkPolicy"]
        assert reaches(policies, part(name), Pod({"app": "search"}, "team"), 7070) == is_reached


def test_unmanaged_leaves_policies_to_the_namespace(run_body: Build, platform: Platform) -> None:
    unmanaged = {"policy": "Unmanaged"}
    for found in (
        children(run_body(network=unmanaged), platform),
        pool_of(platform, network=unmanaged),
    ):
        assert not [m for m in found if m["kind"] == "NetworkPolicy"]


def test_only_rewards_reach_the_models_that_judge(run_body: Build, platform: Platform) -> None:
    body = run_body()
    functions = body["spec"]["roles"]["rewards"]["functions"]
    for name, endpoint in (("a", "https://models.example.com:8443/v1"), ("b", "http://llm.serve")):
        judge = {"endpoint": endpoint, "model": "m", "criteria": "c"}
        functions.append({"name": name, "function": "Judge", "parameters": judge})
    policies = [m for m in children(body, platform) if m["kind"] == "NetworkPolicy"]
    for port, is_reached in ((8443, True), (80, True), (9999, False)):
        assert reaches(policies, role("rewards"), "93.184.216.34", port) == is_reached
    assert not reaches(policies, role("inference"), "93.184.216.34", 8443)
    assert reaches(policies, role("rewards"), Pod({"app": "llm"}, "serve"), 8000)


@pytest.mark.parametrize("endpoint", ["", "llm", "ftp://llm", "http://llm:99999/v1", "http://[", 7])
def test_an_endpoint_that_is_no_url_opens_nothing_and_breaks_nothing(
    run_body: Build, platform: Platform, endpoint: object
) -> None:
    def find_policies() -> list[Manifest]:
        return [m for m in children(body, platform) if m["kind"] == "NetworkPolicy"]

    body = run_body()
    before = find_policies()
    judge = {"endpoint": endpoint, "model": "m", "criteria": "c"}
    body["spec"]["roles"]["rewards"]["functions"].append(
        {"name": "taste", "function": "Judge", "parameters": judge}
    )
    assert find_policies() == before
