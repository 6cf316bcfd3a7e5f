"""Diagnosis of a pod that does not work, from the pod and its Events."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from etude.cli.kubectl.manifests import (
    Manifest,
    condition,
    event_time,
    events_about,
    is_terminating,
    name,
)

PULLS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
CRASHES = {"CrashLoopBackOff"}
UNMADE = {"CreateContainerError", "CreateContainerConfigError", "RunContainerError"}
"""The kubelet cannot create or start the container."""
STORE = re.compile(r"\b((Store|Refused|Denied|NoBucket)Error|StorageUnavailable)\b")
"""Errors of our processes about an object store."""
STUCK = {"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "NetworkNotReady"}
"""Reasons of Events while nothing of a pod runs yet."""

KEEPER = "certificates"
"""Sidecar that renews a pod's certificate."""

EXITS = {
    1: "an error that the program did not expect",
    64: "it was called with something it does not take",
    75: "the object store did not answer",
    78: "it refuses its configuration",
    126: "its command cannot be executed",
    127: "its command is not in the image",
    134: "it aborted",
    137: "it was killed: out of memory, or it did not end in time",
    139: "it crashed inside native code",
    143: "it was told to end",
}
"""Meaning of usual exit codes; 64 and 78 are those of sysexits.h."""


class Finding(NamedTuple):
    """One thing that keeps a pod, a workload or a pool from working."""

    reason: str
    cause: str
    evidence: tuple[str, ...] = ()
    do: str = ""
    """Fix that is more specific than the advice for the reason; may be empty."""


Look = Callable[[Manifest, Sequence[Manifest]], Finding | None]


def is_ready(pod: Manifest) -> bool:
    """True if the pod answers its readiness probe."""
    return condition(pod, "Ready").get("status") == "True"


def first_finding(pods: Iterable[Manifest], events: Sequence[Manifest]) -> Finding | None:
    """The first blocker of some pods: the worst kind first, then by name."""
    staying = sorted((pod for pod in pods if not is_terminating(pod)), key=name)
    for look in LOOKS:
        for pod in staying:
            finding = look(pod, events_about(pod, events))
            if finding is not None:
                return finding
    return None


def _held(pod: Manifest, _events: Sequence[Manifest]) -> Finding | None:
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("reason") != "SchedulingGated":
        return None
    gates = ", ".join(gate["name"] for gate in pod["spec"].get("schedulingGates") or ())
    do = "admit its workload in the queue that holds it: kubectl get workloads, or free its quota"
    return Finding("WaitingForQuota", f"{name(pod)} is held back by a gate", (gates,), do)


def _unschedulable(pod: Manifest, events: Sequence[Manifest]) -> Finding | None:
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        words = scheduled.get("message") or "it says nothing"
        evidence = (f"scheduler: {words}", *_wishes(pod["spec"]))
        return Finding("Unschedulable", f"no node takes {name(pod)}", evidence)
    if not scheduled and not pod["spec"].get("nodeName") and not events:
        cause = f"no scheduler has looked at {name(pod)} yet"
        return Finding("Unschedulable", cause, (), "look whether the cluster's scheduler runs")
    return None


def _wishes(spec: Manifest) -> Iterator[str]:
    """Requirements of a pod on its node, in words."""
    selector = spec.get("nodeSelector") or {}
    if selector:
        wanted = ", ".join(f"{key}={value}" for key, value in selector.items())
        yield f"it wants a node with label {wanted}"
    requests: dict[str, str] = {}
    for container in spec.get("containers", ()):
        requests |= container.get("resources", {}).get("requests") or {}
    if requests:
        yield "it asks for " + ", ".join(f"{value} {key}" for key, value in requests.items())


def _unpulled(pod: Manifest, events: Sequence[Manifest]) -> Finding | None:
    for container in containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in PULLS:
            # A container that backs off repeats itself; the words of the registry are in an Event.
            words = _last(events, {"Failed"}, "Failed to pull") or waiting.get("message", "")
            cause = f"the image of {name(pod)} cannot be pulled: {container['image']}"
            return Finding("ImagePullFailed", cause, (f"kubelet: {words}",), _pull_fix(words))
    return None


def _pull_fix(words: str) -> str:
    for signs, fix in (
        (
            ("not found", "manifest unknown", "404"),
            "the registry has no such image: correct its name or tag, or push it",
        ),
        (
            ("unauthorized", "denied", "403", "401"),
            "the registry wants credentials: add"
            " imagePullSecrets to the namespace's service account",
        ),
        (
            ("no such host", "timeout", "refused", "unreachable"),
            "the node does not reach the registry: check its name, or load the image onto the node",
        ),
        (("InvalidImageName", "invalid reference"), "the name is no image's: correct it"),
    ):
        if any(sign in words for sign in signs):
            return fix
    return ""


def _unmade(pod: Manifest, events: Sequence[Manifest]) -> Finding | None:
    for container in containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in UNMADE:
            words = waiting.get("message") or _last(events, {"Failed"})
            cause = f"the container of {name(pod)} cannot be started"
            return Finding(waiting["reason"], cause, (f"kubelet: {words}",), _missing_fix(words))
    return None


def _stuck(pod: Manifest, events: Sequence[Manifest]) -> Finding | None:
    is_waiting = any("waiting" in each.get("state", {}) for each in containers(pod))
    words = _last(events, STUCK)
    if is_waiting and words:
        cause = f"{name(pod)} has a node, but nothing of it starts"
        return Finding("FailedMount", cause, (f"kubelet: {words}",), _missing_fix(words))
    return None


def _missing_fix(words: str) -> str:
    if "secret" in words and "not found" in words:
        return "create the Secret that is named, in the run's namespace"
    if "configmap" in words and "not found" in words:
        return "the operator makes this ConfigMap: look whether it runs"
    if "seccomp" in words:
        return "copy the profile to /var/lib/kubelet/seccomp of every node: see Run on a cluster"
    return "put right what the kubelet names"


def _crashing(pod: Manifest, _events: Sequence[Manifest]) -> Finding | None:
    for container in containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        ended = ended_of(container)
        is_down = "running" not in container.get("state", {})
        if waiting.get("reason") in CRASHES or (ended and is_down and ended.get("exitCode")):
            count = container.get("restartCount", 0)
            times = f", {count} restarts" if count else ""
            end = End(name(pod), ended.get("exitCode"), ended.get("message") or "", times)
            return end.finding("CrashLooping", is_out_of_memory=ended.get("reason") == "OOMKilled")
    return None


class End(NamedTuple):
    """End of a role's process."""

    pod: str
    exit_code: int | None
    words: str
    """The end of its log."""
    times: str = ""
    """Number of restarts, as the end of a sentence."""

    def finding(self, reason: str, *, is_out_of_memory: bool = False) -> Finding:
        """The blocker of this end; a failure of the object store has a reason of its own."""
        lines = [line.strip() for line in self.words.splitlines() if line.strip()]
        evidence = (f"its last line: {lines[-1]}",) if lines else ()
        if lines and STORE.search(lines[-1]):
            cause = f"{self.pod} cannot use the object store{self.times}"
            return Finding("StorageUnavailable", cause, evidence)
        code = "" if self.exit_code is None else f" with exit code {self.exit_code}"
        why = "out of memory" if is_out_of_memory else EXITS.get(self.exit_code or 0, "")
        meaning = f" ({why})" if why else ""
        return Finding(reason, f"{self.pod} ended{code}{meaning}{self.times}", evidence)


def _uncertified(pod: Manifest, _events: Sequence[Manifest]) -> Finding | None:
    """The certificate sidecar starts before every other container of the pod."""
    sidecars = pod.get("status", {}).get("initContainerStatuses") or ()
    if not any(each["name"] == KEEPER and not each.get("started") for each in sidecars):
        return None
    do = f"kubectl logs {name(pod)} -c {KEEPER} says why; see docs/runbooks/certificates-expire.md"
    return Finding("PodsNotReady", f"{name(pod)} has no certificate yet", (), do)


def _starting(pod: Manifest, events: Sequence[Manifest]) -> Finding | None:
    if is_ready(pod) or pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
        return None
    words = _last(events, {"Unhealthy"}) or _last(events, {"Pulling"})
    evidence = (f"kubelet: {words}",) if words else ()
    return Finding("PodsNotReady", f"{name(pod)} is starting", evidence)


def containers(pod: Manifest) -> Sequence[Manifest]:
    """Status of each container, as the kubelet wrote it."""
    found: Sequence[Manifest] = pod.get("status", {}).get("containerStatuses") or ()
    return found


def ended_of(container: Manifest) -> Manifest:
    """The terminated state of a container, now or before its last restart; empty without one."""
    for state in (container.get("state"), container.get("lastState")):
        ended: Manifest | None = (state or {}).get("terminated")
        if ended:
            return ended
    return {}


def _last(events: Sequence[Manifest], reasons: set[str], start: str = "") -> str:
    """The newest message of these reasons, or an empty string."""
    found = [
        str(each.get("message", ""))
        for each in sorted(events, key=event_time)
        if each.get("reason") in reasons and str(each.get("message", "")).startswith(start)
    ]
    return found[-1] if found else ""


LOOKS: tuple[Look, ...] = (
    *(_held, _unschedulable, _unpulled, _unmade, _crashing, _stuck, _uncertified, _starting),
)
"""The checks of a pod, the worst blocker first."""
