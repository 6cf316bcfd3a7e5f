"""Each measurement of the operator: what is done, what is waited for, what is counted."""

import asyncio
import json
import random
import signal
import time
from functools import partial
from typing import NamedTuple

from tests.support.kube.api_client import MERGE

from operator_bench.api import GROUP, Object, all_of, follow, ticks
from operator_bench.manifests import NAMESPACE, pool
from operator_bench.operator_process import Metrics
from operator_bench.scene import LIMIT_S, POOLS, RUNS, Scene, until_ready

SETTLE_S = 15
"""Without a write of the operator for so long, everything has been said."""
NODES_PER_POOL = 100


class Created(NamedTuple):
    """How fast runs came to be."""

    runs_per_s: float
    ready_per_s: float
    p50_ms: float
    """Of one pass."""
    p99_ms: float
    passes: float
    writes_per_run: float


async def created(scene: Scene, manifests: list[Object]) -> Created:
    """Create runs at once; until each has its children and says so, and until each is Ready."""
    before = await scene.metrics()
    began_s = await scene.make(RUNS, manifests)
    keys = {("RLRun", each["metadata"]["name"]) for each in manifests}
    # A run's own pool belongs to its children, and has children of its own.
    for each in manifests:
        roles = each["spec"]["roles"].get("environments", ())
        keys |= {("EnvPool", f"{each['metadata']['name']}-{role['name']}") for role in roles}
    await scene.until_none(
        lambda: len(keys - scene.seen.observed_s.keys()), "runs to get their children"
    )
    observed = await scene.metrics()
    await scene.until_none(lambda: len(keys - scene.seen.ready_s.keys()), "runs to be Ready")
    after = await settled(scene)
    name = "etude_reconcile_duration_seconds"
    kind = {"kind": "RLRun"}
    return Created(
        runs_per_s=len(manifests) / (max(scene.seen.observed_s[key] for key in keys) - began_s),
        ready_per_s=len(manifests) / (max(scene.seen.ready_s[key] for key in keys) - began_s),
        p50_ms=observed.quantile_ms(before, name, 0.5, **kind),
        p99_ms=observed.quantile_ms(before, name, 0.99, **kind),
        passes=(after.total(f"{name}_count") - before.total(f"{name}_count")) / len(manifests),
        writes_per_run=(after.writes() - before.writes()) / len(manifests),
    )


async def settled(scene: Scene, limit_s: float = LIMIT_S) -> Metrics:
    """Until the operator has written nothing for a while; its metrics then.

    Raises:
        TimeoutError: it never stops.
    """
    known, since_s = await scene.metrics(), time.monotonic()
    began_s = since_s
    while time.monotonic() - since_s < SETTLE_S:
        await asyncio.sleep(1)
        now = await scene.metrics()
        if now.writes() != known.writes():
            known, since_s = now, time.monotonic()
        if time.monotonic() - began_s > limit_s:
            raise TimeoutError(f"the operator still writes after {limit_s:.0f} s")
    return known


class Rest(NamedTuple):
    """What a cluster costs in which nothing happens."""

    writes_per_min: float
    processor_percent: float
    """Of one core."""


async def at_rest(scene: Scene, seconds: float) -> Rest:
    """Do nothing, and count."""
    before, processor_s = await scene.metrics(), scene.operator.processor_s()
    await asyncio.sleep(seconds)
    after = await scene.metrics()
    spent_s = scene.operator.processor_s() - processor_s
    minutes = (after.at_s - before.at_s) / 60
    return Rest((after.writes() - before.writes()) / minutes, spent_s / minutes / 60 * 100)


class Changes(NamedTuple):
    """How soon a changed spec reaches the run's children, in seconds."""

    p50_s: float
    p99_s: float


async def spec_changes(scene: Scene, names: list[str], *, changes: int, per_s: float) -> Changes:
    """Change runs one after the other at a steady pace; until each ConfigMap says so."""
    asked: dict[str, float] = {}
    waits: dict[str, float] = {}

    def arrived(_: str, found: Object) -> None:
        name = found["metadata"]["name"].removesuffix("-run")
        if name in asked and name not in waits and "run.json" in found.get("data", {}):
            spec = json.loads(found["data"]["run.json"])["spec"]
            if spec["checkpointing"].get("keepLast") == 7:
                waits[name] = time.monotonic() - asked[name]

    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
    managed = "app.kubernetes.io/managed-by=etude"
    following = follow(scene.api, path, arrived, labelSelector=managed)
    watching = asyncio.create_task(following, name="watch")
    try:
        await asyncio.sleep(5)
        chosen = random.Random(0).sample(names, min(changes, len(names)))  # noqa: S311 - no secret
        left = iter(chosen)
        async for _ in ticks(1 / per_s):
            name = next(left, None)
            if name is None:
                break
            asked[name] = time.monotonic()
            change = {"spec": {"checkpointing": {"keepLast": 7}}}
            await scene.api.call("PATCH", f"{RUNS}/{name}", change, content=MERGE)
        await scene.until_none(
            lambda: len(chosen) - len(waits), "changes to be in their ConfigMaps", limit_s=300
        )
    finally:
        watching.cancel()
    ordered = sorted(waits.values())
    return Changes(ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))])


class Life(NamedTuple):
    """What a complete life costs, from creation to Complete, and what deletion adds."""

    writes: float
    by_request: dict[str, float]
    deletion_writes: float


async def lives(scene: Scene, manifests: list[Object]) -> Life:
    """Runs that load, step, save twice, finish and are deleted."""
    count = len(manifests)
    names = [each["metadata"]["name"] for each in manifests]
    before = await scene.metrics()
    await scene.make(RUNS, manifests)
    await scene.until_none(
        lambda: sum(not scene.seen.holds("RLRun", name, "Complete") for name in names),
        "lives to be Complete",
    )
    after = await settled(scene)
    await all_of(partial(scene.api.call, "DELETE", f"{RUNS}/{name}") for name in names)
    await scene.until_none(
        lambda: sum(("RLRun", name) in scene.seen.newest for name in names), "lives to be deleted"
    )
    deleted = await settled(scene)
    first, last = before.written(), after.written()
    found = {key: (last[key] - first.get(key, 0)) / count for key in last}
    return Life(
        writes=(after.writes() - before.writes()) / count,
        by_request={key: round(value, 1) for key, value in sorted(found.items()) if value},
        deletion_writes=(deleted.writes() - after.writes()) / count,
    )


async def many_pods(scene: Scene, pods: int) -> float:
    """Pools until the namespace has so many pods, all Ready; returns the seconds that took."""
    there = await scene.api.count(f"/api/v1/namespaces/{NAMESPACE}/pods")
    began_s = time.monotonic()
    missing, number, names = pods - there, 0, list[str]()
    while missing > 0:
        nodes = min(NODES_PER_POOL, missing)
        name = f"pool-{number}"
        await scene.api.call("POST", POOLS, pool(name, nodes))
        names.append(name)
        missing, number = missing - nodes - 1, number + 1  # and the broker's

    def unready() -> int:
        found = [scene.seen.newest.get(("EnvPool", name), {}) for name in names]
        ready = sum(int(each.get("status", {}).get("readyReplicas", 0)) for each in found)
        return max(0, pods - there - len(names) - ready)

    await scene.until_none(unready, "pods to be Ready", every_s=1)
    await settled(scene)
    return time.monotonic() - began_s


class Restart(NamedTuple):
    """How an operator comes back."""

    seconds: float
    """From the start of the process until every object was looked at and nothing is left to do."""
    ready_s: float
    """Until its caches were filled."""
    writes: float
    """Until then; 0 if it found everything as it should be."""


async def restarted(scene: Scene) -> Restart:
    """Kill the operator and start it again, with everything that there is now.

    Raises:
        TimeoutError: it never gets there.
    """
    kinds = ("rlruns", "envpools", "checkpoints")
    paths = [f"{GROUP}/namespaces/{NAMESPACE}/{plural}" for plural in kinds]
    objects = sum([await scene.api.count(path) for path in paths])
    scene.operator.stop(signal.SIGKILL)
    began_s = time.monotonic()
    scene.operator.start()
    ready_s = 0.0
    while True:
        if not ready_s and await scene.operator.is_ready():
            ready_s = time.monotonic() - began_s
        if ready_s:
            now = await scene.metrics()
            passes = now.total("etude_reconcile_total", result="ok")
            if passes >= objects and now.total("etude_workqueue_depth") == 0:
                return Restart(time.monotonic() - began_s, ready_s, now.writes())
        if time.monotonic() - began_s > LIMIT_S:
            raise TimeoutError(f"not consistent within {LIMIT_S} s")
        await asyncio.sleep(0.25)


class Peer(NamedTuple):
    """The same runs by our operator and by a handler of kopf."""

    ours_per_s: float
    theirs_per_s: float


async def beside_kopf(scene: Scene, ours: list[Object], theirs: list[Object]) -> Peer:
    """Equally many runs by each in turn, on the same cluster, until each run has its children."""
    ours_per_s = await _rate(scene, ours)
    await settled(scene)
    scene.operator.stop()
    peer = scene.start("operator_bench.peer")
    try:
        # Its first list is over when a run that is made now is handled.
        await _rate(scene, theirs[:1])
        theirs_per_s = await _rate(scene, theirs[1:])
    finally:
        peer.kill()
        peer.wait(timeout=30)
        scene.operator.start()
    await until_ready(scene.operator)
    return Peer(ours_per_s, theirs_per_s)


async def _rate(scene: Scene, manifests: list[Object]) -> float:
    keys = {("RLRun", each["metadata"]["name"]) for each in manifests}
    began_s = await scene.make(RUNS, manifests)
    await scene.until_none(
        lambda: len(keys - scene.seen.observed_s.keys()), "runs to get their children"
    )
    return len(keys) / (max(scene.seen.observed_s[key] for key in keys) - began_s)
