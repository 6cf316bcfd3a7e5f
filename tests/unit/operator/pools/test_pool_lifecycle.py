"""A pool: its broker, hosts and figures."""

import json
from dataclasses import replace
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool
from etude.common.pools.pool_description import revision_of
from etude.operator.builders.platform import Platform
from etude.operator.kube.interface import ApiRejectedError
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Ref
from etude.operator.pools import acceptance
from etude.operator.pools.decide import desired_ordinals
from etude.v1 import environments_pb2

KEY = Ref("EnvPool", "lab", "repos")


def body(replicas: int = 2, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "repos", "namespace": "lab"},
        "spec": {"templates": [{"name": "python"}], "replicas": replicas, **spec},
    }


def status(lab: Any) -> Any:
    return EnvPool.model_validate(lab.cluster.objects()[KEY]).status


def nodes(lab: Any) -> list[str]:
    return [name for name in lab.names("Pod") if "-node-" in name]


@pytest.fixture
async def pool_lab(lab: Any) -> Any:
    lab.cluster.upsert(body())
    await lab.settle()
    return lab


async def test_a_pool_gets_a_broker_and_its_hosts(pool_lab: Any) -> None:
    assert nodes(pool_lab) == ["repos-node-0", "repos-node-1"]
    assert "repos-broker-0" in pool_lab.names("Pod")
    found = status(pool_lab)
    assert (found.phase, found.replicas, found.ready_replicas) == ("Ready", 2, 2)
    assert found.selector == "etude.dev/pool=repos,etude.dev/role=node"


async def test_p17_a_pool_of_as_many_images_as_it_may_have_has_a_short_status(lab: Any) -> None:
    (limit,) = [
        each.max_length
        for each in EnvPool.model_fields["spec"].annotation.model_fields["templates"].metadata  # type: ignore[union-attr] # a model
        if hasattr(each, "max_length")
    ]
    image = f"s3://images/{'x' * 400}/{'0' * 32}"
    templates = [{"name": f"image-{n}", "image": image} for n in range(limit)]
    lab.cluster.upsert(body(templates=templates, isolation={"minimum": "MicroVM"}))
    await lab.settle()
    for name in nodes(lab):
        lab.end(name, exit_code=1, message="y" * 4_096)
    await lab.settle()
    found = lab.cluster.objects()[KEY]
    assert found["status"]["phase"] == "Degraded", found["status"]
    assert len(json.dumps(found["status"])) < 100 * 1_024


async def test_scaling_down_takes_the_highest_hosts_and_up_fills_the_gaps(pool_lab: Any) -> None:
    pool_lab.cluster.upsert(body(replicas=1))
    await pool_lab.settle()
    assert nodes(pool_lab) == ["repos-node-0"]
    pool_lab.cluster.upsert(body(replicas=3))
    await pool_lab.settle()
    assert nodes(pool_lab) == ["repos-node-0", "repos-node-1", "repos-node-2"]


async def test_a_lost_host_is_replaced_under_the_same_name(pool_lab: Any) -> None:
    key = Ref("Pod", "lab", "repos-node-0")
    before = pool_lab.cluster.objects()[key]["metadata"]["uid"]
    pool_lab.cluster.set_status(key, {"phase": "Failed", "reason": "Evicted"})
    await pool_lab.settle()
    assert nodes(pool_lab) == ["repos-node-0", "repos-node-1"]
    assert pool_lab.cluster.objects()[key]["metadata"]["uid"] != before


async def test_a_pool_scaled_to_zero_has_no_pods_and_says_why(pool_lab: Any) -> None:
    pool_lab.cluster.upsert(body(replicas=0))
    await pool_lab.settle()
    assert pool_lab.names("Pod") == []
    found = status(pool_lab)
    assert found.phase == "ScaledToZero"
    assert found.conditions[1].reason == "ScaledToZero"


async def test_the_brokers_figures_reach_the_status(pool_lab: Any) -> None:
    report = environments_pb2.WatchPoolResponse(
        sequence=1,
        slots=128,
        leased=100,
        waiting=3,
        driver="process",
        isolation=environments_pb2.ISOLATION_WEAK,
        acquire_p99_ms=40,
    )
    pool_lab.peers.pools["repos-broker-0.repos-broker:7020"].append(report)
    await pool_lab.settle()
    await pool_lab.advance(5)
    found = status(pool_lab)
    assert (found.slots.idle, found.slots.leased, found.slots.queued) == (28, 100, 3)
    assert (found.driver, found.isolation, found.leases.acquire_p99_ms) == ("process", "Weak", 40)


async def test_preempted_leases_take_no_slot_and_floors_that_nothing_is_paused_for_are_named(
    pool_lab: Any,
) -> None:
    serving = {"name": "Serving", "floorSlots": 4}
    pool_lab.cluster.upsert(body(lease={"classes": [serving]}))
    report = environments_pb2.WatchPoolResponse(
        sequence=1, nodes=2, slots=8, leased=9, preempted=3, unpreemptible_nodes=2, reserved=1
    )
    pool_lab.peers.pools["repos-broker-0.repos-broker:7020"].append(report)
    await pool_lab.settle()
    await pool_lab.advance(5)
    found = status(pool_lab)
    assert (found.slots.idle, found.slots.leased, found.slots.preempted) == (2, 9, 3)
    assert found.slots.reserved == 1
    available = next(each for each in found.conditions if each.type == "Available")
    assert available.status == "True"
    assert "2 hosts" in available.message


async def test_figures_go_with_the_broker_that_gave_them(pool_lab: Any) -> None:
    report = environments_pb2.WatchPoolResponse(sequence=1, slots=128, leased=100, driver="process")
    pool_lab.peers.pools["repos-broker-0.repos-broker:7020"].append(report)
    await pool_lab.settle()
    await pool_lab.advance(5)
    assert status(pool_lab).slots.leased == 100
    pool_lab.cluster.upsert(body(replicas=0))
    await pool_lab.settle()
    found = status(pool_lab)
    assert (found.slots.idle, found.slots.leased) == (0, 0)
    assert (found.leases, found.driver) == (None, "")


async def test_a_pool_that_cannot_be_read_is_reported_by_name(pool_lab: Any, run_body: Any) -> None:
    pool_lab.cluster.upsert(body(isolation="Strong"))
    run = run_body()
    role = {"name": "repos", "template": "python", "poolRef": {"name": "repos"}}
    run["spec"]["roles"]["environments"] = [role]
    pool_lab.cluster.upsert(run)
    await pool_lab.settle()
    assert pool_lab.condition("Accepted") == ("False", "PoolNotFound")


async def test_hosts_that_refuse_to_start_show_as_an_unavailable_driver(pool_lab: Any) -> None:
    pool_lab.end("repos-node-0", exit_code=78, message="isolation MicroVM needs /dev/kvm")
    pool_lab.end("repos-node-1", exit_code=78, message="isolation MicroVM needs /dev/kvm")
    await pool_lab.settle()
    found = status(pool_lab)
    degraded = next(c for c in found.conditions if c.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "DriverUnavailable")
    assert "needs /dev/kvm" in degraded.message
    assert found.phase == "Degraded"


async def test_weak_isolation_needs_the_platforms_consent(lab: Any, platform: Platform) -> None:
    lab.platform = lab.reconciler.platform = Platform(images=platform.images)
    lab.cluster.upsert(body(isolation={"minimum": "Process"}))
    await lab.settle()
    assert status(lab).conditions[0].reason == "WeakIsolationNotAllowed"
    assert lab.names("Pod") == []


@pytest.mark.parametrize("driver", ["Firecracker", "GVisor"])
async def test_drivers_that_need_root_are_refused_where_hosts_are_pods(
    lab: Any, platform: Platform, driver: str
) -> None:
    lab.cluster.upsert(body(isolation={"minimum": "Sandbox", "driver": driver}))
    await lab.settle()
    accepted = status(lab).conditions[0]
    assert (accepted.status, accepted.reason) == ("False", "InvalidParameters")
    assert f"spec.isolation.driver: {driver} needs root" in accepted.message
    assert lab.names("Pod") == []
    pool = EnvPool.model_validate(lab.cluster.objects()[KEY])
    assert acceptance.pool_problem(pool, replace(platform, has_shared_files=True)) is None


def refuse(monkeypatch: pytest.MonkeyPatch, *names: str) -> str:
    """A quota has no room for objects whose names begin so; returns its words."""
    apply, words = MemoryCluster.apply, "exceeded quota: compute, used: pods=3, limited: pods=3"

    async def limited(self: Any, manifest: Any, *, manager: str) -> Any:
        if manifest["metadata"]["name"].startswith(names):
            raise ApiRejectedError(words)
        return await apply(self, manifest, manager=manager)

    monkeypatch.setattr(MemoryCluster, "apply", limited)
    return words


async def test_a_pool_that_may_not_grow_hands_out_what_it_has(
    pool_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = refuse(monkeypatch, "repos-node-2")
    pool_lab.cluster.upsert(body(replicas=3))
    await pool_lab.settle()
    found = status(pool_lab)
    said = {each.type: (each.status, each.reason, each.message) for each in found.conditions}
    assert said["Accepted"] == ("False", "Refused", words)
    assert said["Available"][:2] == ("True", "NodesReady")
    assert (found.phase, found.ready_replicas, found.desired) == ("Warming", 2, 3)


async def test_a_pool_of_which_nothing_may_be_made_is_pending(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "repos-broker", "repos-node")
    lab.cluster.upsert(body())
    await lab.settle()
    found = status(lab)
    said = {each.type: (each.status, each.reason) for each in found.conditions}
    assert said["Accepted"] == ("False", "Refused")
    assert said["Available"] == ("False", "BrokerNotReady")
    assert found.phase == "Pending"


async def test_a_host_on_its_way_out_keeps_its_ordinal() -> None:
    def node(number: int, *, leaves: bool = False) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": f"repos-node-{number}"}
        return {"metadata": metadata | ({"deletionTimestamp": "now"} if leaves else {})}

    assert desired_ordinals([node(0, leaves=True), node(1)], 2) == (1, 2)
    assert desired_ordinals([node(3), node(5), node(7)], 2) == (3, 5, 7)
    assert desired_ordinals([], 2) == (0, 1)


async def test_brokers_with_an_older_spec_are_given_the_newer_one(pool_lab: Any) -> None:
    async def report(revision: str, sequence: int) -> None:
        said = environments_pb2.WatchPoolResponse(sequence=sequence, pool_revision=revision)
        pool_lab.peers.pools["repos-broker-0.repos-broker:7020"].append(said)
        await pool_lab.settle()
        await pool_lab.advance(5)

    (text,) = (
        each["data"]["pool.json"]
        for each in pool_lab.cluster.objects().values()
        if each["kind"] == "ConfigMap" and "pool.json" in each["data"]
    )
    await report(revision_of(text), 1)
    assert not pool_lab.peers.pool_specs

    await report("0" * 32, 2)
    assert pool_lab.peers.pool_specs == {"repos-broker-0.repos-broker:7020": text}


async def test_a_pool_of_privileged_nodes_has_the_hosts_that_its_broker_reports(lab: Any) -> None:
    lab.platform = replace(lab.platform, node_pools=frozenset({"lab/repos"}))
    lab.start()
    lab.cluster.upsert(body(isolation={"minimum": "Sandbox", "driver": "GVisor"}))
    await lab.settle()
    assert nodes(lab) == []
    reports = lab.peers.pools["repos-broker-0.repos-broker:7020"]

    why = "spec.isolation.driver: runsc is not installed"
    problem = environments_pb2.NodeProblem(node_id="vms-1", message=why)
    reports.append(environments_pb2.WatchPoolResponse(sequence=1, problems=[problem]))
    await lab.settle()
    await lab.advance(5)
    available = status(lab).conditions[1]
    assert (available.status, available.reason) == ("False", "DriverUnavailable")
    assert available.message == f"vms-1: {why}"

    members = [environments_pb2.NodeFigures(node_id=name) for name in ("vms-1", "vms-2")]
    reports.append(environments_pb2.WatchPoolResponse(sequence=2, slots=32, members=members))
    await lab.settle()
    await lab.advance(5)
    found = status(lab)
    assert (found.phase, found.replicas, found.desired, found.ready_replicas) == ("Ready", 2, 2, 2)
    assert nodes(lab) == []


async def test_hosts_from_before_a_pool_had_privileged_nodes_are_drained_and_go(
    pool_lab: Any,
) -> None:
    lab = pool_lab
    assert nodes(lab) == ["repos-node-0", "repos-node-1"]
    lab.platform = replace(lab.platform, node_pools=frozenset({"lab/repos"}))
    lab.peers.hosts_in_use = {"repos-node-1"}
    await lab.kill()
    await lab.settle()
    await lab.advance(5)
    assert nodes(lab) == ["repos-node-1"]
    lab.peers.hosts_in_use.clear()
    await lab.advance(5)
    assert nodes(lab) == []


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"maxReplicas": 3, "autoscaling": {"mode": "Reactive"}}, "spec.autoscaling"),
        (
            {
                "isolation": {"minimum": "Process"},
                "store": {"secretRef": {"name": "s3"}},
                "snapshotsUri": "s3://bucket/snapshots",
            },
            "spec.snapshotsUri",
        ),
        ({"store": {"endpoint": "http://minio:9000"}}, "spec.store.endpoint"),
    ],
)
async def test_privileged_nodes_get_no_credentials_and_no_size(
    lab: Any, spec: dict[str, Any], field: str
) -> None:
    own = frozenset({"lab/repos"})
    lab.platform = replace(lab.platform, node_pools=own, allows_weak_isolation=True)
    lab.start()
    whole = body(**{"isolation": {"minimum": "Sandbox", "driver": "GVisor"}, **spec})
    if "autoscaling" in spec:
        del whole["spec"]["replicas"]
    lab.cluster.upsert(whole)
    await lab.settle()
    accepted = status(lab).conditions[0]
    assert (accepted.status, accepted.reason) == ("False", "InvalidParameters")
    assert accepted.message.startswith(field)
