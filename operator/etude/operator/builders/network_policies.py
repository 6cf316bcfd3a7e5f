"""NetworkPolicies of runs, pools, routes and checkpoint Jobs.

Policies add up and are directed: a connection needs egress at the caller and ingress at the callee.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlparse

from etude.common.api.kinds import EnvPool, EvalRun, PolicyRoute, RLRun
from etude.common.api.pool.network import EgressPolicy
from etude.common.api.run.http_gateway import PolicyGateway
from etude.common.api.storage import StoreAccess
from etude.operator import names
from etude.operator.builders import http_route
from etude.operator.builders.addresses import ISSUER_PORT, PORTS
from etude.operator.builders.pod import PROBE_PORT
from etude.operator.builders.workload import Owner, object_head, owner_labels
from etude.operator.manifests import Manifest

ANYWHERE = {
    "0.0.0.0/0": ["169.254.0.0/16"],
    "::/0": ["fe80::/10", "fd00:ec2::254/128", "fd20:ce::254/128"],
}
"""Every address except those of cloud metadata services, which hand out a node's credentials.

Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html,
https://cloud.google.com/compute/docs/metadata/querying-metadata."""
OPERATOR_LABELS = {"app.kubernetes.io/name": "etude", "app.kubernetes.io/component": "operator"}
ISSUER_LABELS = {"app.kubernetes.io/name": "etude", "app.kubernetes.io/component": "issuer"}
NAMESPACE = "kubernetes.io/metadata.name"
"""Label with which Kubernetes names every namespace."""
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""One part of a name in a cluster (RFC 1123)."""
DNS_PORT = 53
SCHEME_PORTS = {"http": 80, "https": 443}
OTLP_PORT = 443
"""Of an address that names none, whatever its scheme: gRPC takes it so (gRPC Name Resolution,
https://github.com/grpc/grpc/blob/master/doc/naming.md)."""

Rule = Manifest
Selector = Mapping[str, str]


def run_policies(
    run: RLRun, pools: Sequence[str], operator_namespace: str, *, asks_issuer: bool = False
) -> list[Manifest]:
    """One policy for each role of a run.

    Args:
        run: the run.
        pools: names of the EnvPools of its environments.
        operator_namespace: where the operator runs, which dials the controller.
        asks_issuer: its pods get their certificates from the chart's own issuer.
    """
    roles = run.spec.roles
    outside = _external_egress(run.spec.storage, run.spec.observability.otlp_endpoint)
    egress = [*outside, *(_issuer_egress(operator_namespace) if asks_issuer else [])]
    environments = [rule for pool in pools for rule in _pool_egress(pool)]
    operator = _from_operator(operator_namespace, names.TRAINER)
    policies = [_trainer_policy(run, operator, [*egress, *environments])]
    if roles.inference is not None:
        part = _role_selector(run, names.INFERENCE)
        ingress = [_from([_role_selector(run, names.TRAINER)], names.INFERENCE)]
        ingress += [_from_gateway(run, each) for each in _gateways(run)]
        policies.append(_policy(run, names.INFERENCE, part, ingress, egress))
    if roles.rewards is not None:
        part = _role_selector(run, names.REWARDS)
        ingress = [_from([_role_selector(run, names.TRAINER)], names.REWARDS)]
        judges = _endpoint_egress(roles.rewards.judge_endpoints)
        policies.append(
            _policy(run, names.REWARDS, part, ingress, [*egress, *environments, *judges])
        )
    # A Job has no peer that asks for its certificate.
    job = {names.SAVED_BY: run.metadata.name, names.ROLE: names.JANITOR}
    return [*policies, _policy(run, names.JANITOR, job, [], outside)]


def _role_selector(run: RLRun, role: str) -> Selector:
    return {names.RUN: run.metadata.name, names.ROLE: role}


def _trainer_policy(run: RLRun, operator: Rule, outside: Sequence[Rule]) -> Manifest:
    trainer = _role_selector(run, names.TRAINER)
    # Ray processes talk to each other on arbitrary ports.
    among = [_pods(trainer)] if run.spec.scheduling.kind == "RayCluster" else []
    partners = [
        _to(_role_selector(run, names.INFERENCE), names.INFERENCE),
        _to(_role_selector(run, names.REWARDS), names.REWARDS),
    ]
    return _policy(
        run,
        names.TRAINER,
        trainer,
        [operator, *({"from": [each]} for each in among)],
        [*({"to": [each]} for each in among), *partners, *outside],
    )


def pool_policies(
    pool: EnvPool, operator_namespace: str, *, asks_issuer: bool = False, grants_reads: bool = False
) -> list[Manifest]:
    """One policy for each part of a pool, which any run of its namespace may use.

    With `grants_reads` its brokers list the store's objects, for hosts without credentials.
    """
    ours = {names.POOL: pool.metadata.name}
    broker, node, edge = (
        {**ours, names.ROLE: role} for role in (names.BROKER, names.HOST, names.ENVIRONMENT_API)
    )
    drivers = (names.TRAINER, names.EVALUATOR, names.REWARDS)
    clients: list[Selector] = [*({names.ROLE: role} for role in drivers), edge]
    issuer = _issuer_egress(operator_namespace) if asks_issuer else []
    signals = _external_egress(None, pool.spec.observability.otlp_endpoint) + issuer
    stored = _external_egress(pool.spec.store, pool.spec.observability.otlp_endpoint) + issuer
    outside = list(stored)
    if pool.spec.search.service is not None:
        outside += _endpoint_egress([pool.spec.search.service])
    # Registries are anywhere, on any port: spec.images.sources says which a host asks.
    if pool.spec.network.egress is not EgressPolicy.NONE or pool.spec.images is not None:
        # The host's own proxy tells environments apart, and enforces their rules.
        outside.append(_internet_egress(()))
    parts = [
        _policy(
            pool,
            names.BROKER,
            broker,
            [
                _from_operator(operator_namespace, names.BROKER),
                _from([*clients, node], names.BROKER),
            ],
            [*(stored if grants_reads else signals), _to(node, names.HOST)],
        ),
        _policy(
            pool,
            names.HOST,
            node,
            [_from([*clients, broker], names.HOST)],
            [*outside, _to(broker, names.BROKER)],
        ),
    ]
    if pool.spec.edge is not None:
        parts.append(_edge_policy(pool, edge, signals))
    return parts


def _edge_policy(pool: EnvPool, edge: Selector, signals: list[Rule]) -> Manifest:
    """The policy of a pool's environment API, which anyone may call."""
    public = {"ports": _ports(PORTS[names.ENVIRONMENT_API].values())}
    egress = [*signals, *_pool_egress(pool.metadata.name)]
    return _policy(pool, names.ENVIRONMENT_API, edge, [public], egress)


def route_policies(
    route: PolicyRoute, run: RLRun, operator_namespace: str, *, asks_issuer: bool = False
) -> list[Manifest]:
    """One policy for each part of a route, whose services anyone may call.

    Args:
        route: the route.
        run: the run that it serves, whose store it shares.
        operator_namespace: where issuer and operator run, which asks for the state of releases.
        asks_issuer: its pods get their certificates from the chart's own issuer.
    """
    ours = {names.ROUTE: route.metadata.name}
    pods = {name: {**ours, names.ROLE: name} for name in route.spec.channels.by_name}
    issuer = _issuer_egress(operator_namespace) if asks_issuer else []
    store = _external_egress(run.spec.storage, None) + issuer
    signals = _external_egress(run.spec.storage, run.spec.observability.otlp_endpoint) + issuer
    gateway = {**ours, names.ROLE: names.GATEWAY}
    to_engines = [_to(selected, channel) for channel, selected in pods.items()]
    feedback = {**ours, names.ROLE: names.FEEDBACK}
    public = {
        role: {"ports": _ports([PORTS[role]["http"]])} for role in (names.GATEWAY, names.FEEDBACK)
    }
    callers: dict[str, list[Selector]] = {channel: [gateway] for channel in pods}
    loans = []
    if route.spec.channels.lending is not None:
        trainer = _role_selector(run, names.TRAINER)
        callers[names.STABLE].append(trainer)
        loans = [_policy(route, "borrower", trainer, [], to_engines[:1])]
    engines = [
        _policy(route, channel, selected, [_from(callers[channel], channel)], signals)
        for channel, selected in pods.items()
    ]
    to_services = [*store, *to_engines, _to(feedback, names.FEEDBACK)]
    from_callers = [
        public[names.FEEDBACK],
        _from_operator(operator_namespace, names.FEEDBACK),
        _from([gateway], names.FEEDBACK),
    ]
    return [
        *engines,
        *loans,
        _policy(route, names.GATEWAY, gateway, [public[names.GATEWAY]], to_services),
        _policy(route, names.FEEDBACK, feedback, from_callers, store),
    ]


def evaluation_policies(
    evaluation: EvalRun, run: RLRun, operator_namespace: str, *, asks_issuer: bool = False
) -> list[Manifest]:
    """One policy for each role of an evaluation.

    Args:
        evaluation: the evaluation.
        run: the run whose store, rewards and collector it uses.
        operator_namespace: namespace of the issuer.
        asks_issuer: its pods get their certificates from the chart's own issuer.
    """
    outside = _external_egress(run.spec.storage, run.spec.observability.otlp_endpoint)
    egress = [*outside, *(_issuer_egress(operator_namespace) if asks_issuer else [])]
    pools = sorted({each.pool_ref.name for each in evaluation.spec.environments})
    environments = [rule for pool in pools for rule in _pool_egress(pool)]
    rewards = run.spec.roles.rewards
    judges = _endpoint_egress(rewards.judge_endpoints) if rewards is not None else []
    endpoint = evaluation.spec.endpoint
    driver, engines, graders = (
        {names.EVALUATION: evaluation.metadata.name, names.ROLE: role}
        for role in (names.EVALUATOR, names.INFERENCE, names.REWARDS)
    )
    from_driver = [_from([driver], names.INFERENCE)]
    policies = [_policy(evaluation, names.INFERENCE, engines, from_driver, egress)]
    sampled = [_to(engines, names.INFERENCE)]
    if endpoint is not None:
        policies, sampled = [], _endpoint_egress([endpoint.url])
    partners = [*sampled, _to(graders, names.REWARDS)]
    return [
        _policy(evaluation, names.EVALUATOR, driver, [], [*egress, *partners, *environments]),
        *policies,
        _policy(
            evaluation,
            names.REWARDS,
            graders,
            [_from([driver], names.REWARDS)],
            [*egress, *environments, *judges],
        ),
    ]


def job_policy(job: Manifest, store: StoreAccess) -> Manifest:
    """The egress policy of a Job that outlives its run and the run's policy."""
    metadata = job["metadata"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    # Without the labels that the Job controller adds.
    selected = {name: labels[name] for name in (names.CHECKPOINT, names.ROLE)}
    owner = {name: job[name] for name in ("apiVersion", "kind")}
    owner |= {"name": metadata["name"], "uid": metadata["uid"], "controller": True}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {name: labels[name] for name in (names.MANAGED_BY, names.CHECKPOINT)},
            "ownerReferences": [owner],
        },
        "spec": {
            "podSelector": {"matchLabels": selected},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": _external_egress(store, None),
        },
    }


def _policy(
    owner: Owner,
    role: str,
    selected: Selector,
    ingress: Sequence[Rule],
    egress: Sequence[Rule],
) -> Manifest:
    labels = owner_labels(owner)
    name = names.child(owner.metadata.name, role)
    # Probes and metrics hold no secrets, and the platform chooses who scrapes them.
    probes = {"ports": _ports([PROBE_PORT])}
    spec = {
        "podSelector": {"matchLabels": dict(selected)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [probes, *ingress],
        "egress": list(egress),
    }
    return {
        **object_head(owner, "networking.k8s.io/v1", "NetworkPolicy", name, labels),
        "spec": spec,
    }


def _pool_egress(pool: str) -> list[Rule]:
    return [_to({names.POOL: pool, names.ROLE: role}, role) for role in (names.BROKER, names.HOST)]


def _to(selector: Selector, role: str) -> Rule:
    return {"to": [_pods(selector)], "ports": _ports(PORTS[role].values())}


def _from(selectors: Sequence[Selector], role: str) -> Rule:
    return {"from": [_pods(each) for each in selectors], "ports": _ports(PORTS[role].values())}


def _from_operator(namespace: str, role: str) -> Rule:
    peer = _namespace(namespace) | _pods(OPERATOR_LABELS)
    return {"from": [peer], "ports": _ports([PORTS[role]["grpc"]])}


def _issuer_egress(namespace: str) -> list[Rule]:
    peer = _namespace(namespace) | _pods(ISSUER_LABELS)
    return [{"to": [peer], "ports": _ports([ISSUER_PORT])}]


def _gateways(run: RLRun) -> list[PolicyGateway]:
    inference = run.spec.roles.inference
    return [] if inference is None or inference.gateway is None else [inference.gateway]


def _from_gateway(run: RLRun, gateway: PolicyGateway) -> Rule:
    peer = _namespace(http_route.proxy_namespace(run, gateway))
    return {"from": [peer], "ports": _ports(http_route.ENGINE_PORT.values())}


def _external_egress(store: StoreAccess | None, otlp_endpoint: str | None) -> list[Rule]:
    """Egress to DNS, the object store and the collector, whose addresses are unknown."""
    dns = [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]
    rules: list[Rule] = [{"ports": dns}]
    urls, ports = [], []
    if store is not None:
        urls.append(store.endpoint)
        ports.append(_port_of(store.endpoint))
    if otlp_endpoint is not None:
        urls.append(otlp_endpoint)
        ports.append(urlparse(otlp_endpoint).port or OTLP_PORT)
    if ports:
        rules.append(_internet_egress(sorted(set(ports))))
    return rules + _service_egress(url for url in urls if url is not None)


def _endpoint_egress(endpoints: Sequence[str]) -> list[Rule]:
    """Egress to services of others, by URL: models that judge or are evaluated, code search."""
    if not endpoints:
        return []
    ports = sorted({_port_of(url) for url in endpoints})
    return [_internet_egress(ports), *_service_egress(endpoints)]


def _port_of(url: str | None) -> int:
    if url is None:
        return SCHEME_PORTS["https"]
    parts = urlparse(url)
    return parts.port or SCHEME_PORTS[parts.scheme]


def _service_egress(urls: Iterable[str]) -> list[Rule]:
    """Egress to Services in the cluster, by whole namespaces; the callee's ingress applies as well.

    Policies are judged by a pod's own port, which a Service may map to any other, and some network
    plugins never take a pod's address for part of a block.
    """
    found = {_namespace_of(url) for url in urls}
    peers = [
        _namespace(name) if name else {"podSelector": {}}
        for name in sorted(n for n in found if n is not None)
    ]
    return [{"to": peers}] if peers else []


def _namespace_of(url: str) -> str | None:
    """Namespace of a Service with that host name: "" for the pod's own; None if it is none.

    A public name of two parts looks like a Service too, in a namespace that does not exist.
    """
    match (urlparse(url).hostname or "").rstrip(".").split("."):
        case [service] if LABEL.fullmatch(service):
            return ""
        case [_, namespace] | [_, namespace, "svc", *_] if LABEL.fullmatch(namespace):
            return namespace
        case _:
            return None


def _internet_egress(ports: Sequence[int]) -> Rule:
    """Egress to every address but metadata services; on every port if none is given."""
    blocks = [{"ipBlock": {"cidr": all_, "except": own}} for all_, own in ANYWHERE.items()]
    return {"to": blocks, **({"ports": _ports(ports)} if ports else {})}


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE: name}}}


def _pods(labels: Selector) -> Manifest:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _ports(numbers: Iterable[int]) -> list[Manifest]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]
