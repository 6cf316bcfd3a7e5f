"""What the operator may expect of a cluster, in memory as on a real API server."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.chart.helm import ROOT

from etude.common.api.kinds import RLRun
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape, run_children
from etude.operator.kube.cache import WatchCache
from etude.operator.kube.client import KubernetesCluster
from etude.operator.kube.interface import Cluster, ConflictError, NameTakenError
from etude.operator.kube.leases import (
    KubernetesLeaseStore,
    LeaderLease,
    LeaseStore,
    MemoryLeaseStore,
)
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.kube.rest import RestClient, path_of
from etude.operator.kube.watches import Watches
from etude.operator.manifests import Manifest, Ref, ref, resource_version, uid

LIMIT_S = 60.0
MANAGER = "etude/test"


@dataclass
class Bench:
    """A cluster, a namespace in it, and a user who makes pools."""

    cluster: Cluster
    namespace: str
    rest: RestClient | None = None
    watches: Watches | None = None

    async def pool(self, name: str) -> Manifest:
        """Make a pool, as a user does and as kopf tells."""
        metadata = {"name": name, "namespace": self.namespace}
        body = {
            "apiVersion": "etude.dev/v1alpha1",
            "kind": "EnvPool",
            "metadata": metadata,
            "spec": {"templates": [{"name": "python"}]},
        }
        if self.rest is None or self.watches is None:
            assert isinstance(self.cluster, MemoryCluster)
            return self.cluster.upsert(body)
        reply = await self.rest.request("POST", path_of("EnvPool", self.namespace), body=body)
        assert reply.status == 201, reply
        self.watches.apply_event("ADDED", reply.body)
        return reply.body

    def config(self, owner: Manifest, **data: str) -> Manifest:
        """A child of a pool."""
        by = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
        by |= {"name": owner["metadata"]["name"], "uid": uid(owner)}
        metadata = {
            "name": "child",
            "namespace": self.namespace,
            "labels": {"app.kubernetes.io/managed-by": "etude"},
            "ownerReferences": [by],
        }
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}

    @property
    def child(self) -> Ref:
        return Ref("ConfigMap", self.namespace, "child")

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():  # noqa: ASYNC110 - the cache is polled as a reader would
                await asyncio.sleep(0.02)


@pytest.fixture(params=["memory", "kubernetes"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "memory":
        yield Bench(MemoryCluster(), "lab")
        return
    state: Mapping[str, Any] = request.getfixturevalue("cluster")
    request.getfixturevalue("crds")
    namespace: str = request.getfixturevalue("namespace")
    rest, cache = await RestClient.connect(Path(state["kubeconfig"])), WatchCache()
    watches = Watches(rest, cache, (namespace,))
    await watches.sync()
    watching = asyncio.create_task(watches.keep_watching())
    try:
        yield Bench(KubernetesCluster(rest, cache), namespace, rest, watches)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await rest.close()


async def test_what_was_applied_is_read_back_at_once_and_told(bench: Bench) -> None:
    owner = await bench.pool("p")
    told: list[Ref] = []
    bench.cluster.subscribe(lambda manifest: told.append(ref(manifest)))
    await bench.cluster.apply(bench.config(owner, a="1"), manager=MANAGER)
    found = bench.cluster.get(bench.child)
    assert found is not None
    assert found["data"] == {"a": "1"}
    assert bench.cluster.list_objects("ConfigMap") == [found]
    assert bench.cluster.list_owned(uid(owner)) == [found]
    assert bench.child in told


async def test_what_is_not_said_any_more_is_gone(bench: Bench) -> None:
    owner = await bench.pool("p")
    await bench.cluster.apply(bench.config(owner, a="1", b="2"), manager=MANAGER)
    before = bench.cluster.get(bench.child)
    await bench.cluster.apply(bench.config(owner, b="3"), manager=MANAGER)
    after = bench.cluster.get(bench.child)
    assert before is not None
    assert after is not None
    assert after["data"] == {"b": "3"}
    assert uid(after) == uid(before)


def children(owner: Manifest, namespace: str) -> list[Manifest]:
    """One of every kind that a run has, as if a pool's."""
    by = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
    by |= {"name": owner["metadata"]["name"], "uid": uid(owner)}
    path = ROOT / "examples" / "demo" / "rlrun.yaml"
    (body,) = (
        each
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if each["kind"] == "RLRun"
    )
    run = RLRun.model_validate(body)
    images = dict.fromkeys(("trainer", "inference", "rewards", "envserver", "operator"), "etude:1")
    made = run_children(run, RunShape(images=images), Platform(namespace="etude-system"))
    return [
        {**m, "metadata": {**m["metadata"], "namespace": namespace, "ownerReferences": [by]}}
        for m in made
        if m["kind"] != "EnvPool"
    ]


async def applied(bench: Bench, manifest: Manifest) -> Manifest:
    """As the loop does it: a conflict with a controller's write is tried again."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(ConflictError):
                return await bench.cluster.apply(manifest, manager=MANAGER)


async def test_a_change_of_one_field_leaves_the_others_and_their_defaults(bench: Bench) -> None:
    """What the API server filled in for a create is not taken away by the first change."""
    manifests = children(await bench.pool("p"), bench.namespace)
    assert {"StatefulSet", "Service", "ConfigMap", "NetworkPolicy"} <= {
        m["kind"] for m in manifests
    }
    for manifest in manifests:
        made = await bench.cluster.apply(manifest, manager=MANAGER)
        metadata = manifest["metadata"]
        labels = {**metadata["labels"], "example.com/changed": "yes"}
        changed = {**manifest, "metadata": {**metadata, "labels": labels}}
        after = await applied(bench, changed)
        assert after["metadata"]["labels"] == labels
        assert uid(after) == uid(made)
        assert after.get("spec") == made.get("spec")
        again = await applied(bench, manifest)
        assert again["metadata"]["labels"] == metadata["labels"]
        assert again.get("spec") == made.get("spec")


async def test_an_object_of_another_owner_is_left_alone(bench: Bench) -> None:
    owner, other = await bench.pool("p"), await bench.pool("other")
    await bench.cluster.apply(bench.config(owner, a="1"), manager=MANAGER)
    with pytest.raises(NameTakenError):
        await bench.cluster.apply(bench.config(other, a="2"), manager=MANAGER)
    found = bench.cluster.get(bench.child)
    assert found is not None
    assert found["data"] == {"a": "1"}


async def test_the_very_object_is_deleted_and_no_other_of_its_name(bench: Bench) -> None:
    owner = await bench.pool("p")
    made = await bench.cluster.apply(bench.config(owner, a="1"), manager=MANAGER)
    await bench.cluster.delete(bench.child, uid=str(uuid.uuid4()))
    found = bench.cluster.get(bench.child)
    assert found is not None
    assert "deletionTimestamp" not in found["metadata"]
    await bench.cluster.delete(bench.child, uid=uid(made))
    await bench.cluster.delete(bench.child, uid=uid(made))
    await bench.until(lambda: bench.cluster.get(bench.child) is None)
    assert bench.cluster.list_owned(uid(owner)) == []


async def test_a_status_is_written_over_what_was_seen_only(bench: Bench) -> None:
    seen = await bench.pool("p")
    await bench.cluster.replace_status(seen, {"phase": "Pending", "observedGeneration": 1})
    found = bench.cluster.get(ref(seen))
    assert found is not None
    with pytest.raises(ConflictError):
        await bench.cluster.replace_status(seen, {"phase": "Ready"})
    await bench.cluster.replace_status(found, {"phase": "Ready"})
    found = bench.cluster.get(ref(seen))
    assert found is not None
    assert found["status"] == {"phase": "Ready"}
    assert found["metadata"]["generation"] == seen["metadata"]["generation"]


async def test_an_object_stays_until_its_last_finalizer_is_taken_off(bench: Bench) -> None:
    owner = await bench.pool("p")
    manifest = bench.config(owner, a="1")
    manifest["metadata"]["finalizers"] = ["etude.dev/test"]
    made = await bench.cluster.apply(manifest, manager=MANAGER)
    await bench.cluster.delete(bench.child, uid=uid(made))
    found = bench.cluster.get(bench.child)
    assert found is not None
    assert found["metadata"]["deletionTimestamp"]
    await bench.until(lambda: is_newer(bench.cluster.get(bench.child), made))
    with pytest.raises(ConflictError):
        await bench.cluster.set_finalizers(made, [])
    found = bench.cluster.get(bench.child)
    assert found is not None
    await bench.cluster.set_finalizers(found, [])
    await bench.until(lambda: bench.cluster.get(bench.child) is None)


def is_newer(found: Manifest | None, than: Manifest) -> bool:
    return found is not None and resource_version(found) > resource_version(than)


async def test_an_event_that_was_told_already_is_fine(bench: Bench) -> None:
    about = await bench.pool("p")
    regarding = {key: about["metadata"][key] for key in ("name", "namespace", "uid")}
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "p.1", "namespace": bench.namespace},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "etude.dev/test",
        "reportingInstance": "test",
        "action": "Reconcile",
        "reason": "Tested",
        "note": "twice",
        "type": "Normal",
        "regarding": {"apiVersion": about["apiVersion"], "kind": "EnvPool", **regarding},
    }
    for _ in range(2):
        await bench.cluster.record_event(event)


@pytest.fixture
def leases(bench: Bench) -> LeaseStore:
    if bench.rest is None:
        return MemoryLeaseStore()
    return KubernetesLeaseStore(bench.rest, bench.namespace, "leader")


async def test_a_lease_is_written_over_the_version_that_was_read_only(leases: LeaseStore) -> None:
    assert await leases.read() is None
    first = await leases.write(LeaderLease("a"))
    assert first.version
    assert await leases.read() == first
    with pytest.raises(ConflictError):
        await leases.write(LeaderLease("b"))
    second = await leases.write(first._replace(holder="b", transitions=1))
    with pytest.raises(ConflictError):
        await leases.write(first)
    assert await leases.read() == second


async def test_a_lease_is_released_and_taken_again(leases: LeaseStore) -> None:
    held = await leases.write(LeaderLease("a"))
    free = await leases.write(held._replace(holder=""))
    assert await leases.read() == free
    taken = await leases.write(free._replace(holder="b"))
    assert (await leases.read()) == taken
