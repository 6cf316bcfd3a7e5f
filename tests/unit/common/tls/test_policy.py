"""Who may call what."""

import importlib
import pkgutil
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import etude.v1
from etude.common.tls.identity import Identity
from etude.common.tls.policy import ALLOWED_CALLERS, OPEN, refusal

JUDGES_BY_TOKEN = "etude.v1.CertificateService"
FILES = [
    importlib.import_module(f"etude.v1.{module.name}")
    for module in pkgutil.iter_modules(etude.v1.__path__)
    if module.name.endswith("_pb2")
]
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if service.full_name != JUDGES_BY_TOKEN
]
SERVERS = {
    "RunService": "trainer",
    "PoolService": "broker",
    "EnvBrokerService": "broker",
    "BrokerPeerService": "broker",
    "InferenceService": "inference",
    "WeightService": "inference",
    "RewardService": "rewards",
    "EnvNodeService": "node",
    "EnvAccessService": "node",
    "EnvStateService": "node",
    "ReleaseService": "feedback",
    "TurnKeyService": "feedback",
    "FeedbackService": "feedback",
}
IN_RUN = ("trainer", "inference", "rewards")
IN_POOL = ("broker", "node", "edge")


def who(role: str, *, run: str = "a", pool: str = "p", namespace: str = "lab") -> Identity:
    if role in IN_RUN:
        pool = ""
    if role == "operator":
        run = pool = ""
    return Identity(domain="d", namespace=namespace, run=run, pool=pool, role=role)


def server_of(method: str) -> Identity:
    return who(SERVERS[method.rpartition("/")[0].rpartition(".")[2]])


def roles_that_may(method: str) -> set[str]:
    roles = ("operator", *IN_RUN, *IN_POOL)
    return {role for role in roles if not refusal(who(role), server_of(method), method)}


def test_every_service_of_the_wire_is_on_the_list() -> None:
    services = {method.rpartition("/")[0].removeprefix("/") for method in METHODS}
    assert services == {name.partition("/")[0] for name in ALLOWED_CALLERS}


@pytest.mark.parametrize(
    ("method", "roles"),
    [
        ("/etude.v1.RunService/Command", {"operator"}),
        ("/etude.v1.PoolService/WatchPool", {"operator"}),
        ("/etude.v1.ReleaseService/Promote", {"operator"}),
        ("/etude.v1.InferenceService/Generate", {"trainer"}),
        ("/etude.v1.WeightService/CommitVersion", {"trainer"}),
        ("/etude.v1.RewardService/Score", {"trainer"}),
        ("/etude.v1.EnvBrokerService/LaunchBatch", {"trainer", "rewards", "edge"}),
        ("/etude.v1.EnvBrokerService/Heartbeat", {"node"}),
        ("/etude.v1.EnvBrokerService/DescribePool", {"node"}),
        ("/etude.v1.EnvBrokerService/GrantReads", {"node"}),
        ("/etude.v1.PoolService/UpdatePool", {"operator"}),
        ("/etude.v1.EnvNodeService/RunTurn", {"trainer", "rewards", "edge"}),
        ("/etude.v1.EnvNodeService/OpenEnvironments", {"broker"}),
        ("/etude.v1.EnvNodeService/CloseEnvironments", {"broker"}),
        ("/etude.v1.EnvNodeService/PreemptEnvironments", {"broker"}),
        ("/etude.v1.EnvNodeService/ResumePreempted", {"broker"}),
    ],
)
def test_a_method_is_for_the_roles_that_need_it(method: str, roles: set[str]) -> None:
    assert roles_that_may(method) == roles


@pytest.mark.parametrize("method", METHODS)
def test_nobody_of_another_namespace_but_the_operator_calls_anything(method: str) -> None:
    for role in (*IN_RUN, *IN_POOL):
        assert refusal(who(role, namespace="other"), server_of(method), method)


@pytest.mark.parametrize("method", METHODS)
def test_nobody_of_another_run_calls_a_part_of_this_one(method: str) -> None:
    for role in IN_RUN:
        assert refusal(who(role, run="b"), server_of(method), method)


def test_a_pool_of_nobody_in_particular_serves_every_run_of_its_namespace() -> None:
    shared = who("broker", run="")
    for run, role in product(("a", "b"), ("trainer", "rewards")):
        assert not refusal(who(role, run=run), shared, "/etude.v1.EnvBrokerService/LaunchBatch")


def test_a_host_speaks_to_its_own_broker_alone() -> None:
    broker = who("broker", run="", pool="p")
    beat = "/etude.v1.EnvBrokerService/Heartbeat"
    assert not refusal(who("node", run="", pool="p"), broker, beat)
    assert refusal(who("node", run="", pool="q"), broker, beat)


def test_gateways_call_the_engines_of_their_own_route_alone() -> None:
    def of(route: str, role: str) -> Identity:
        return Identity(domain="d", namespace="lab", route=route, role=role)

    for called in (
        "/etude.v1.InferenceService/Generate",
        "/etude.v1.InferenceService/GetEngineInfo",
        "/etude.v1.WeightService/GetWeightStatus",
    ):
        assert not refusal(of("a", "gateway"), of("a", "stable"), called)
        assert refusal(of("b", "gateway"), of("a", "stable"), called)
        # One without a route calls nobody, and a run's engines are its trainer's.
        for caller in (of("", "gateway"), of("a", "gateway")):
            assert refusal(caller, who("inference"), called)
    assert refusal(who("trainer"), of("a", "stable"), "/etude.v1.InferenceService/GetEngineInfo")
    lend = "/etude.v1.WeightService/SetLending"
    assert not refusal(of("a", "gateway"), of("a", "stable"), lend)
    for caller in (of("b", "gateway"), who("trainer")):
        assert refusal(caller, of("a", "stable"), lend)
    assert refusal(of("a", "gateway"), of("a", "stable"), "/etude.v1.WeightService/CommitVersion")


def test_trainers_reach_engines_of_routes_which_choose_the_run_and_no_other_runs() -> None:
    engine = Identity(domain="d", namespace="lab", route="a", role="stable")
    for called in (
        "/etude.v1.InferenceService/Generate",
        "/etude.v1.WeightService/GetWeightStatus",
    ):
        assert not refusal(who("trainer"), engine, called)
        assert refusal(who("trainer", namespace="other"), engine, called)
        assert refusal(who("trainer", run="b"), who("inference", run="a"), called)
        assert refusal(who("rewards"), engine, called)


@given(st.sampled_from(METHODS), st.sampled_from(("operator", *IN_RUN, *IN_POOL)))
def test_another_trust_domain_is_another_world(method: str, role: str) -> None:
    stranger = replace(who(role), domain="elsewhere")
    assert "another trust domain" in refusal(stranger, server_of(method), method)


def test_what_is_not_listed_is_for_nobody() -> None:
    words = refusal(who("trainer"), who("rewards"), "/etude.v1.SecretService/Tell")
    assert words.endswith("that is for nobody")


@pytest.mark.parametrize("service", sorted(OPEN))
def test_health_and_reflection_are_for_everybody_who_is_known(service: str) -> None:
    assert not refusal(who("node", namespace="other"), who("trainer"), f"/{service}/Check")


@given(st.sampled_from(METHODS))
def test_a_namespaces_certificate_stands_for_all_in_it_but_the_operator(method: str) -> None:
    everyone = Identity(domain="d", namespace="lab")
    is_operators = roles_that_may(method) == {"operator"}
    for callee in (server_of(method), everyone):
        assert bool(refusal(everyone, callee, method)) is is_operators
    assert refusal(replace(everyone, namespace="other"), server_of(method), method)
