"""A trainer as a RayCluster with one pod or several, at its usual address."""

from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
from tests.support.kube.controllers.kuberay import head_service

from etude.common.api.kinds import RLRun
from etude.operator.builders import run as desired
from etude.operator.builders import run_spec
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape
from etude.operator.manifests import Manifest, Ref

RAY = {"workload": "RayCluster"}


@pytest.fixture
def platform(platform: Platform) -> Platform:
    return replace(platform, integrations=frozenset({"kuberay"}))


def with_trainer(run_body: Any, **trainer: Any) -> Manifest:
    body: Manifest = run_body(scheduling=RAY)
    body["spec"]["roles"]["trainer"] = trainer
    return body


def children_of(body: Manifest, platform: Platform) -> dict[tuple[str, str], Manifest]:
    shape = RunShape(images=platform.images)
    made = desired.run_children(RLRun.model_validate(body), shape, platform)
    return {(m["kind"], m["metadata"]["name"]): m for m in made}


@pytest.mark.parametrize(
    ("ranks", "gpus", "workers"),
    [(1, 0, 0), (4, 0, 0), (8, 8, 0), (16, 8, 1), (3, 1, 2)],
)
def test_there_are_as_many_workers_as_the_ranks_need_beside_the_head(
    ranks: int, gpus: int, workers: int, run_body: Any, platform: Platform
) -> None:
    body = with_trainer(run_body, learnerRanks=ranks, gpusPerReplica=gpus)
    made = children_of(body, platform)
    groups = made["RayCluster", "demo"]["spec"]["workerGroupSpecs"]
    assert [group["replicas"] for group in groups] == ([workers] if workers else [])
    assert run_spec.pods_by_role(RLRun.model_validate(body))["trainer"] == 1 + workers


def test_pods_of_a_ray_cluster_are_valid_and_ask_for_what_the_trainer_asks_for(
    run_body: Any, platform: Platform
) -> None:
    body = with_trainer(run_body, learnerRanks=4, gpusPerReplica=2, memory="8Gi")
    spec = children_of(body, platform)["RayCluster", "demo"]["spec"]
    head, worker = spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]
    for name, template in (("head", head), ("worker", worker)):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {**pod["metadata"], "name": name}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": "2"}
        assert "--num-gpus=2" in container["command"][-1]
        assert template["metadata"]["labels"]["etude.dev/role"] == "trainer"
    assert head["spec"]["containers"][0]["command"][-1].endswith("&& exec etude-trainer")
    assert "RAY_ADDRESS" in {each["name"] for each in head["spec"]["containers"][0]["env"]}
    assert "startupProbe" not in worker["spec"]["containers"][0]


def test_settings_of_the_network_and_the_topology_are_on_every_pod_of_the_trainer(
    run_body: Any, platform: Platform
) -> None:
    interface = {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}
    body = with_trainer(run_body, learnerRanks=16, gpusPerReplica=8, env=[interface])
    body["spec"]["scheduling"]["topology"] = {"required": "example.com/rack"}
    spec = children_of(body, platform)["RayCluster", "demo"]["spec"]
    groups = (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    assert len(groups) == 2
    for pod in (group["template"]["spec"] for group in groups):
        # Ray's processes inherit the environment of `ray start`, which is the container's.
        assert interface in pod["containers"][0]["env"]
        (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "example.com/rack"
        assert term["labelSelector"]["matchLabels"]["etude.dev/role"] == "trainer"


def test_kuberay_can_make_its_service_of_the_heads_ports(run_body: Any, platform: Platform) -> None:
    body = with_trainer(run_body, learnerRanks=4, gpusPerReplica=2)
    cluster = children_of(body, platform)["RayCluster", "demo"]
    cluster["metadata"]["uid"] = "uid-cluster"
    ports = {each["name"]: each["port"] for each in head_service(cluster)["spec"]["ports"]}
    assert len(set(ports.values())) == len(ports)
    assert ports["gcs-server"] == 6379
    head, worker = (
        template["spec"]["containers"][0]
        for template in (
            cluster["spec"]["headGroupSpec"]["template"],
            cluster["spec"]["workerGroupSpecs"][0]["template"],
        )
    )
    for container in (head, worker):
        (metrics,) = (each for each in container["ports"] if each["name"] == "metrics")
        assert metrics["containerPort"] == ports["metrics"]
        assert f"--metrics-export-port={ports['metrics']}" in container["command"][-1]


def test_a_port_of_the_users_takes_the_place_of_ours_with_its_name(
    run_body: Any, platform: Platform
) -> None:
    theirs = {"name": "metrics", "containerPort": 9100}
    container = {"name": "trainer", "ports": [theirs]}
    template = {"spec": {"containers": [container]}}
    body = with_trainer(run_body, learnerRanks=1, gpusPerReplica=1, podTemplate=template)
    spec = children_of(body, platform)["RayCluster", "demo"]["spec"]["headGroupSpec"]["template"]
    ports = spec["spec"]["containers"][0]["ports"]
    assert [each for each in ports if each["name"] == "metrics"] == [theirs]


def test_everything_but_the_trainer_stays_a_stateful_set(run_body: Any, platform: Platform) -> None:
    made = children_of(with_trainer(run_body, learnerRanks=2, gpusPerReplica=1), platform)
    assert {name for kind, name in made if kind == "StatefulSet"} == {
        "demo-inference",
        "demo-rewards",
    }
    assert ("Service", "demo-trainer") in made


def test_parts_of_ray_reach_each_other(run_body: Any, platform: Platform) -> None:
    made = children_of(with_trainer(run_body, learnerRanks=2, gpusPerReplica=1), platform)
    spec = made["NetworkPolicy", "demo-trainer"]["spec"]
    mine = {"podSelector": spec["podSelector"]}
    assert {"from": [mine]} in spec["ingress"]
    assert {"to": [mine]} in spec["egress"]


async def test_the_head_is_dialled_and_the_workers_are_waited_for(lab: Any, run_body: Any) -> None:
    lab.cluster.integrations = frozenset({"RayCluster"})
    lab.cluster.upsert(with_trainer(run_body, learnerRanks=2, gpusPerReplica=1))
    await lab.settle()
    cluster = lab.cluster.objects()[Ref("RayCluster", "lab", "demo")]
    pod(lab, cluster, "demo-head-x", "head")
    await lab.settle()
    assert lab.run().status.phase == "Provisioning"
    assert "demo-trainer-0.demo-trainer:7000" in lab.peers.runs
    pod(lab, cluster, "demo-learners-worker-y", "worker")
    await lab.settle()
    (role,) = (r for r in lab.run().status.roles if r.name == "trainer")
    assert (role.desired, role.ready) == (2, 2)
    assert lab.condition("RolesReady") == ("True", "PodsReady")


def pod(lab: Any, cluster: Manifest, name: str, kind: str) -> None:
    """What KubeRay would make."""
    spec = cluster["spec"]
    groups = {"head": spec["headGroupSpec"], "worker": spec["workerGroupSpecs"][0]}
    template = groups[kind]["template"]
    owner = {"uid": cluster["metadata"]["uid"], "kind": "RayCluster", "controller": True}
    labels = {**template["metadata"]["labels"], "ray.io/node-type": kind}
    metadata = {"name": name, "namespace": "lab", "labels": labels, "ownerReferences": [owner]}
    lab.cluster.upsert(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    )


def test_the_token_of_a_hub_is_on_the_head_alone(run_body: Any, platform: Platform) -> None:
    body = with_trainer(run_body, learnerRanks=16, gpusPerReplica=8)
    body["spec"]["model"] = {"uri": "hf://org/tiny@main", "secretRef": {"name": "hub"}}
    spec = children_of(body, platform)["RayCluster", "demo"]["spec"]

    def secrets(group: Manifest) -> list[str]:
        (container,) = group["template"]["spec"]["containers"]
        return [each["secretRef"]["name"] for each in container["envFrom"]]

    assert secrets(spec["headGroupSpec"]) == ["s3", "hub"]
    assert secrets(spec["workerGroupSpecs"][0]) == ["s3"]
