"""Diagnosis of workloads that create no pods, and of pools that grant no environments."""

from collections.abc import Iterable, Iterator, Sequence

from etude.cli.kubectl import manifests
from etude.cli.kubectl.diagnose import pods
from etude.cli.kubectl.diagnose.advice import advice
from etude.cli.kubectl.diagnose.pods import Blocker
from etude.cli.kubectl.diagnose.run_objects import RunObjects, pool_names
from etude.cli.kubectl.manifests import Manifest


def pool_blocker(seen: RunObjects) -> Blocker | None:
    """The first blocker of a run's pools, in the order of its environments."""
    there = {manifests.name_of(pool): pool for pool in seen.pools}
    for name in pool_names(seen.run):
        pool = there.get(name)
        blocker: Blocker | None = missing_pool(name)
        if pool is not None:
            blocker = find_pool_blocker(pool, seen.pods_of(name), seen.events)
        if blocker is not None:
            return blocker
    return None


def missing_pool(name: str) -> Blocker:
    """The blocker of a pool that does not exist."""
    return Blocker("PoolNotFound", f"pool {name} does not exist in this namespace")


def find_pool_blocker(
    pool: Manifest, of_pool: Iterable[Manifest], events: Sequence[Manifest]
) -> Blocker | None:
    """The first blocker of a pool, from its conditions, its pods and Events."""
    name = manifests.name_of(pool)
    accepted, available = (
        manifests.condition_of(pool, "Accepted"),
        manifests.condition_of(pool, "Available"),
    )
    if accepted.get("status") == "False" and available.get("status") != "True":
        return _condition_blocker(name, accepted)
    if not available:
        return Blocker("PoolWarming", f"the operator has not looked at pool {name} yet")
    degraded = manifests.condition_of(pool, "Degraded")
    if available["status"] == "False":
        waiting = [pod for pod in of_pool if not pods.is_ready(pod)]
        return _find_unavailable(name, pods.first_blocker(waiting, events), available, degraded)
    return None


def _find_unavailable(
    name: str, blocker: Blocker | None, available: Manifest, degraded: Manifest
) -> Blocker:
    """The blocker of a pool that grants nothing: from its pods, else from its conditions."""
    if available.get("reason") == "ScaledToZero":
        return _condition_blocker(name, available)._replace(
            do=f"kubectl scale envp {name} --replicas=N"
        )
    if blocker is not None and blocker.reason != "PodsNotReady":
        refused = degraded.get("status") == "True" and degraded["reason"] == "DriverUnavailable"
        reason = "DriverUnavailable" if refused else blocker.reason
        evidence = (f"pool {name} hands out no environments", *blocker.evidence)
        return blocker._replace(reason=reason, evidence=evidence)
    return _condition_blocker(name, degraded if degraded.get("status") == "True" else available)


def _condition_blocker(name: str, condition: Manifest) -> Blocker:
    """The blocker of a pool with a condition as its cause."""
    reason = condition["reason"]
    words = condition.get("message")
    known = advice(reason, condition["type"])
    cause = f"pool {name}: {known.means}"
    return Blocker(reason, cause, (words,) if words else (), known.do)


def full_pool_blocker(seen: RunObjects) -> Blocker | None:
    """The first pool of the run without an idle slot and with waiting requests."""
    for pool in seen.pools:
        slots = pool.get("status", {}).get("slots") or {}
        if int(slots.get("queued", 0)) and not int(slots.get("idle", 0)):
            cause = f"every environment of pool {manifests.name_of(pool)} is taken"
            return Blocker("NoIdleSlot", cause, tuple(_figures(pool, slots)))
    return None


def _figures(pool: Manifest, slots: Manifest) -> Iterator[str]:
    yield f"{slots.get('leased', 0)} leased, none idle, {slots.get('queued', 0)} asked for"
    status = pool["status"]
    yield f"{status.get('readyReplicas', 0)} of {status.get('replicas', 0)} nodes ready"


def workload_blocker(sets: Iterable[Manifest], events: Sequence[Manifest]) -> Blocker | None:
    """The first workload whose pods the API server refuses."""
    for workload in sets:
        wanted = int(workload["spec"].get("replicas", 0))
        if int(workload.get("status", {}).get("replicas", 0)) >= wanted:
            continue
        words = [
            str(each.get("message", ""))
            for each in manifests.events_about(workload, events)
            if each.get("reason") == "FailedCreate"
        ]
        if words:
            return _refused_pods(manifests.name_of(workload), words[-1])
    return None


def _refused_pods(workload: str, words: str) -> Blocker:
    evidence = (f"API server: {words}",)
    if "exceeded quota" in words:
        return Blocker("WaitingForQuota", f"pods of {workload} wait for quota", evidence)
    return Blocker("Refused", f"the API server refuses the pods of {workload}", evidence)
