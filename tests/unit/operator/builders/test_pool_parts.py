"""Optional parts of a pool: several brokers, host placement, the environment API."""

import json
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.kinds import EnvPool, RLRun
from etude.common.api.pool.spec import EnvPoolSpec
from etude.operator.builders import pool as desired_pools
from etude.operator.builders import run as desired
from etude.operator.builders.certificates import CertificateMode, PlatformTls
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape
from etude.operator.manifests import Manifest, Ref
from etude.operator.pools.acceptance import pool_problem
from etude.operator.remotes.combined_report import combine_reports
from etude.v1 import environments_pb2

KEY = Ref("EnvPool", "lab", "repos")
SERVICE = "repos-broker:7020"
TARGETS = [f"repos-broker-{place}.repos-broker:7020" for place in range(3)]
EDGE = {"keysRef": {"name": "keys"}, "maxSandboxes": 7, "workspace": "s3://inputs/empty"}


def body(**spec: Any) -> Manifest:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "repos", "namespace": "lab"},
        "spec": {"templates": [{"name": "python"}], "replicas": 2, **spec},
    }


def children(pool: EnvPool, platform: Platform, **spec: Any) -> dict[tuple[str, str], Manifest]:
    changed = EnvPoolSpec.model_validate({**pool.spec.to_json(), **spec})
    made = desired_pools.pool_children(
        pool.model_copy(update={"spec": changed}), (0,), platform.images, platform
    )
    for manifest in made:
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(manifest, version, strict=True)
    return {(m["kind"], m["metadata"]["name"]): m for m in made}


def pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"].get("template", workload)["spec"]
    return spec


def variables(workload: Manifest) -> dict[str, str]:
    (container,) = pod(workload)["containers"]
    return {item["name"]: item.get("value", "") for item in container["env"]}


def test_each_of_several_brokers_knows_its_place_and_hosts_know_all_in_order(
    pool: EnvPool, platform: Platform
) -> None:
    made = children(pool, platform, brokers=3)
    brokers = made["StatefulSet", "repos-broker"]
    assert brokers["spec"]["replicas"] == 3
    told = variables(brokers)
    assert told["ETUDE_BROKER_TARGET"] == SERVICE
    assert told["ETUDE_ADVERTISE"] == "$(ETUDE_POD_IP):7020"
    assert pod(brokers) == pod(children(pool, platform)["StatefulSet", "repos-broker"])
    assert variables(made["Pod", "repos-node-0"])["ETUDE_BROKER_TARGET"] == SERVICE


def test_runs_know_all_brokers_of_their_own_and_of_others_pools(
    run_body: Any, platform: Platform
) -> None:
    manifest = run_body()
    (own,) = manifest["spec"]["roles"]["environments"]
    own["poolTemplate"]["brokers"] = 2
    shared = {"name": "shared", "template": "python", "poolRef": {"name": "repos"}}
    manifest["spec"]["roles"]["environments"].append(shared)
    shape = RunShape(images=platform.images)
    made = desired.run_children(RLRun.model_validate(manifest), shape, platform)
    trainer = next(
        m for m in made if m["metadata"]["name"] == "demo-trainer" and "template" in m["spec"]
    )
    brokers = json.loads(variables(trainer)["ETUDE_BROKERS"])
    assert brokers == {"shared": SERVICE, "repos": "demo-repos-broker:7020"}


async def test_a_run_finds_the_brokers_of_a_pool_of_others_however_many(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(body(brokers=3))
    manifest = run_body()
    role = {"name": "repos", "template": "python", "poolRef": {"name": "repos"}}
    manifest["spec"]["roles"]["environments"] = [role]
    lab.cluster.upsert(manifest)
    await lab.settle()
    found = lab.cluster.objects()[Ref("StatefulSet", "lab", "demo-trainer")]
    assert json.loads(variables(found)["ETUDE_BROKERS"]) == {"repos": SERVICE}


async def test_the_figures_of_all_brokers_reach_the_status_until_one_is_gone(lab: Any) -> None:
    lab.cluster.upsert(body(brokers=3))
    await lab.settle()
    for place, target in enumerate(TARGETS):
        told = environments_pb2.WatchPoolResponse(
            sequence=1, slots=64, leased=10 * place, driver="memory"
        )
        lab.peers.pools[target].append(told)
    await lab.settle()
    await lab.advance(5)
    found = EnvPool.model_validate(lab.cluster.objects()[KEY]).status
    assert found.slots is not None
    assert found.slots.leased == 30

    lab.end("repos-broker-2", exit_code=1)
    await lab.settle()
    await lab.advance(5)
    found = EnvPool.model_validate(lab.cluster.objects()[KEY]).status
    assert found.slots is not None
    assert found.slots.leased == 10
    available = next(c for c in found.conditions if c.type == "Available")
    assert (available.reason, available.message) == ("BrokerNotReady", "2 of 3 brokers are ready")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4))
def test_slots_are_the_sum_over_brokers_because_a_host_belongs_to_one(leased: list[int]) -> None:
    said = [
        environments_pb2.WatchPoolResponse(slots=50, nodes=2, leased=own, preempted=own // 2)
        for own in leased
    ]
    found = combine_reports(said)
    assert found is not None
    assert (found.slots, found.leased) == (50 * len(leased), sum(leased))
    assert found.preempted == sum(own // 2 for own in leased)
    assert found.nodes == 2 * len(leased)


def test_warm_starts_count_by_how_many_a_broker_granted() -> None:
    said = [
        environments_pb2.WatchPoolResponse(warm_percent=90, granted_total=9),
        environments_pb2.WatchPoolResponse(warm_percent=0, granted_total=1),
    ]
    found = combine_reports(said)
    assert found is not None
    assert found.warm_percent == 81
    assert combine_reports([]) is None


def test_hosts_run_where_their_pool_says_and_brokers_anywhere(
    pool: EnvPool, platform: Platform
) -> None:
    placement = {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "environments", "operator": "Exists", "effect": "NoSchedule"}],
        "onePerMachine": True,
    }
    made = children(pool, platform, placement=placement)
    node = pod(made["Pod", "repos-node-0"])
    assert node["nodeSelector"] == {"disk": "fast"}
    assert node["tolerations"] == placement["tolerations"]
    (term,) = node["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = made["Pod", "repos-node-0"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert not {"nodeSelector", "affinity"} & pod(made["StatefulSet", "repos-broker"]).keys()


@pytest.mark.parametrize(
    ("cpu", "slots", "requested"),
    [("50m", 64, "3200m"), ("0.25", 4, "1000m"), ("0.0001", 3, "1m"), ("2", 1, "2000m")],
)
def test_a_host_requests_the_cpu_of_all_its_slots(
    pool: EnvPool, platform: Platform, cpu: str, slots: int, requested: str
) -> None:
    made = children(pool, platform, slot={"cpu": cpu}, slotsPerReplica=slots)
    (container,) = pod(made["Pod", "repos-node-0"])["containers"]
    assert container["resources"] == {"requests": {"cpu": requested}}
    (container,) = pod(made["StatefulSet", "repos-broker"])["containers"]
    assert "resources" not in container


def test_an_edge_is_one_pod_behind_a_service_and_reads_its_keys_from_a_secret(
    pool: EnvPool, platform: Platform
) -> None:
    made = children(pool, platform, edge=EDGE, brokers=3)
    edge, service = made["StatefulSet", "repos-edge"], made["Service", "repos-edge"]
    assert edge["spec"]["replicas"] == 1
    assert "clusterIP" not in service["spec"]
    assert [port["port"] for port in service["spec"]["ports"]] == [7050]
    assert (
        service["spec"]["selector"].items()
        <= edge["spec"]["template"]["metadata"]["labels"].items()
    )
    told = variables(edge)
    assert told["ETUDE_BROKER_TARGET"] == SERVICE
    assert (told["ETUDE_PORT"], told["ETUDE_EDGE_MAX_SANDBOXES"]) == ("7050", "7")
    assert told["ETUDE_EDGE_WORKSPACE"] == "s3://inputs/empty"
    (container,) = pod(edge)["containers"]
    assert container["command"] == ["etude-envserver", "edge"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["keys"]["readOnly"] is True
    assert told["ETUDE_EDGE_KEYS"] == f"{mounts['keys']['mountPath']}/keys"
    (volume,) = [v for v in pod(edge)["volumes"] if v["name"] == "keys"]
    assert volume["secret"] == {"secretName": "keys", "items": [{"key": "keys", "path": "keys"}]}
    assert "envFrom" not in container


def test_an_edge_serves_with_the_certificate_of_its_secret(
    pool: EnvPool, platform: Platform
) -> None:
    plain = children(pool, platform, edge=EDGE)["StatefulSet", "repos-edge"]
    assert "ETUDE_EDGE_TLS" not in variables(plain)
    edge = children(pool, platform, edge={**EDGE, "tlsRef": {"name": "cert"}})[
        "StatefulSet", "repos-edge"
    ]
    mounts = {
        each["mountPath"]: each["name"] for each in pod(edge)["containers"][0]["volumeMounts"]
    }
    (volume,) = [
        each
        for each in pod(edge)["volumes"]
        if each["name"] == mounts[variables(edge)["ETUDE_EDGE_TLS"]]
    ]
    assert volume["secret"]["secretName"] == "cert"
    assert {item["key"] for item in volume["secret"]["items"]} == {"tls.crt", "tls.key"}


@pytest.mark.parametrize("mode", [CertificateMode.SECRET, CertificateMode.PLAINTEXT])
def test_an_edge_needs_a_certificate_unless_plaintext_is_chosen(
    pool: EnvPool, platform: Platform, mode: CertificateMode
) -> None:
    secured = replace(platform, tls=PlatformTls(mode=mode, secret="wire"))
    for spec, is_refused in (
        (EDGE, mode is CertificateMode.SECRET),
        ({**EDGE, "tlsRef": {"name": "cert"}}, False),
    ):
        body_of = body(edge=spec)
        problem = pool_problem(EnvPool.model_validate(body_of), secured)
        assert (problem is not None) == is_refused
        if problem is not None:
            assert problem.message.startswith("spec.edge.tlsRef: is needed")


async def test_an_edge_comes_with_its_field_and_goes_with_it(lab: Any) -> None:
    lab.cluster.upsert(body(edge=EDGE))
    await lab.settle()
    assert "repos-edge-0" in lab.names("Pod")
    lab.cluster.upsert(body())
    await lab.settle()
    assert [name for kind in ("Pod", "Service", "StatefulSet") for name in lab.names(kind)] == [
        "repos-broker-0",
        "repos-node-0",
        "repos-node-1",
        "repos-broker",
        "repos-broker",
    ]


async def test_an_edge_that_cannot_start_shows_in_its_pool(lab: Any) -> None:
    lab.cluster.upsert(body(edge=EDGE))
    await lab.settle()
    lab.end("repos-edge-0", exit_code=78, message="keys: holds no key, or two of one name")
    await lab.settle()
    found = EnvPool.model_validate(lab.cluster.objects()[KEY]).status
    degraded = next(c for c in found.conditions if c.type == "Degraded")
    assert degraded.status == "True"
    assert "holds no key" in degraded.message


async def test_an_edge_on_one_machine_is_refused_with_what_to_do(
    lab: Any, platform: Platform
) -> None:
    lab.reconciler.platform = Platform(
        images=platform.images, has_shared_files=True, allows_weak_isolation=True
    )
    lab.cluster.upsert(body(edge=EDGE))
    await lab.settle()
    found = EnvPool.model_validate(lab.cluster.objects()[KEY]).status
    assert found.conditions[0].reason == "InvalidParameters"
    assert "etude-envserver edge" in found.conditions[0].message
    assert lab.names("Pod") == []


@pytest.mark.parametrize(
    "toleration",
    [{"value": "x", "operator": "Exists"}, {"value": "x"}, {"key": "a b", "operator": "Exists"}],
)
def test_a_toleration_that_kubernetes_would_refuse_is_refused_first(
    pool: EnvPool, toleration: dict[str, str]
) -> None:
    spec = {**pool.spec.to_json(), "placement": {"tolerations": [toleration]}}
    with pytest.raises(ValueError, match="toleration"):
        EnvPoolSpec.model_validate(spec)


def test_hosts_alone_have_the_credentials_that_egress_rules_name(
    pool: EnvPool, platform: Platform
) -> None:
    credential = {"secretRef": {"name": "tokens"}, "key": "shop"}
    rules = [
        {"name": name, "host": f"{name}.example.com", "mode": "Https", "credential": credential}
        for name in ("a", "b")
    ]
    made = children(pool, platform, network={"egress": "Custom", "rules": rules})
    node, broker = made["Pod", "repos-node-0"], made["StatefulSet", "repos-broker"]

    (volume,) = [each for each in pod(node)["volumes"] if each["name"] == "egress"]
    items = [{"key": "shop", "path": "tokens/shop"}]
    assert volume["projected"]["sources"] == [{"secret": {"name": "tokens", "items": items}}]
    # Read by its group, and by no other user of the container: by default by everybody.
    assert volume["projected"]["defaultMode"] == 0o440
    assert pod(node)["securityContext"]["fsGroup"] == pod(node)["securityContext"]["runAsGroup"]
    assert variables(node)["ETUDE_EGRESS_SECRETS"] == "/etc/etude-egress"
    assert "ETUDE_EGRESS_SECRETS" not in variables(broker)
    assert all(each["name"] != "egress" for each in pod(broker)["volumes"])


def test_a_pool_without_credentials_mounts_none(pool: EnvPool, platform: Platform) -> None:
    node = children(pool, platform)["Pod", "repos-node-0"]
    assert all(each["name"] != "egress" for each in pod(node)["volumes"])


def test_hosts_alone_have_the_credentials_of_registries(pool: EnvPool, platform: Platform) -> None:
    images = {"sources": ["ghcr.io/acme"], "pullSecretRef": {"name": "registries"}}
    made = children(pool, platform, images=images)
    node, broker = made["Pod", "repos-node-0"], made["StatefulSet", "repos-broker"]
    (volume,) = [each for each in pod(node)["volumes"] if each["name"] == "pull"]
    assert volume["secret"]["secretName"] == "registries"
    assert volume["secret"]["defaultMode"] == 0o440
    file = "/etc/etude/pull/.dockerconfigjson"
    assert variables(node)["ETUDE_PULL_CREDENTIALS"] == file
    assert "ETUDE_PULL_CREDENTIALS" not in variables(broker)
    assert all(each["name"] != "pull" for each in pod(broker)["volumes"])


def test_brokers_alone_have_the_stores_secret_where_hosts_are_privileged(
    pool: EnvPool, platform: Platform
) -> None:
    store = {"endpoint": "http://minio.lab.svc:9000", "secretRef": {"name": "s3"}}
    at = f"{pool.metadata.namespace}/{pool.metadata.name}"

    def readers(platform: Platform) -> set[str]:
        made = children(pool, platform, store=store).items()
        return {
            kind
            for (kind, _), each in made
            if "spec" in each and '"s3"' in json.dumps(each["spec"])
        }

    assert readers(platform) == {"Pod"}
    assert readers(replace(platform, node_pools=frozenset({at}))) == {"StatefulSet"}

    def reaches_store(platform: Platform) -> bool:
        name = f"{pool.metadata.name}-broker"
        policy = children(pool, platform, store=store)["NetworkPolicy", name]
        ports = [p["port"] for rule in policy["spec"]["egress"] for p in rule.get("ports", ())]
        return 9000 in ports

    platform = replace(platform, namespace="etude-system")
    assert not reaches_store(platform)
    assert reaches_store(replace(platform, node_pools=frozenset({at})))


def test_a_pool_of_processes_takes_no_images(pool: EnvPool) -> None:
    spec = {
        **pool.spec.to_json(),
        "isolation": {"driver": "Process", "minimum": "Process"},
        "images": {"sources": ["ghcr.io/acme"]},
    }
    with pytest.raises(ValueError, match="takes no images"):
        EnvPoolSpec.model_validate(spec)
