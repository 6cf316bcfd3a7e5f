"""Startup time of pods by stage, as a metric."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.operator import metrics, names
from etude.operator.clock import parse_rfc3339
from etude.operator.manifests import Manifest, condition, is_deleting, is_true, labels, uid

NODE = "scheduled"
"""From creation to scheduling: quota, queue, capacity."""
CONTAINERS = "started"
"""From scheduling to the start of the last container: claims, volumes, images."""
READY = "ready"
"""From there to readiness: devices, the model, the store."""


@dataclass(slots=True)
class PodStartups:
    """Observes each pod's startup once, and only of pods seen before they were ready.

    A restarted operator finds thousands of ready pods, whose startups were counted before.
    """

    _starting: set[str] = field(default_factory=set)
    """Uids of pods seen before they were ready."""
    _settled: set[str] = field(default_factory=set)
    """Uids of pods that were ready once: becoming ready again is no startup."""

    def observe(self, pod: Manifest) -> None:
        role, name = labels(pod).get(names.ROLE), uid(pod)
        if role not in names.ROLES or name in self._settled:
            return
        if is_true(pod, "Ready"):
            self._settled.add(name)
            if name in self._starting:
                self._starting.discard(name)
                _count(role, pod)
        elif is_deleting(pod):
            self._starting.discard(name)
        else:
            self._starting.add(name)

    def forget(self, pod: Manifest) -> None:
        self._starting.discard(uid(pod))
        self._settled.discard(uid(pod))


def _count(role: str, pod: Manifest) -> None:
    for stage, taken_s in startup_stages(pod).items():
        metrics.STARTUP_SECONDS.labels(role, stage).observe(taken_s)


def startup_stages(pod: Manifest) -> Mapping[str, float]:
    """Seconds of each stage of a ready pod; empty while one of its times is unknown."""
    if not is_true(pod, "Ready"):
        return {}
    containers = pod.get("status", {}).get("containerStatuses") or ()
    running = [(each.get("state") or {}).get("running") or {} for each in containers]
    moments = [
        pod["metadata"].get("creationTimestamp"),
        condition(pod, "PodScheduled").get("lastTransitionTime"),
        max((each.get("startedAt") or "" for each in running), default=""),
        condition(pod, "Ready").get("lastTransitionTime"),
    ]
    if not all(moments):
        return {}
    at_s = [parse_rfc3339(str(moment)) for moment in moments]
    # Clocks of API server, scheduler and kubelet differ; no stage is negative.
    return {
        stage: max(0.0, end_s - begin_s)
        for stage, begin_s, end_s in zip(
            (NODE, CONTAINERS, READY), at_s[:-1], at_s[1:], strict=True
        )
    }
