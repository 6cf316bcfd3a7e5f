"""Diagnosis of a pod that does not work, from the pod and its Events."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from etude.cli.kubectl.manifests import (
    Manifest,
    condition_of,
    event_time,
    events_about,
    is_terminating,
    name_of,
)

PULLS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
CRASHES = {"CrashLoopBackOff"}
UNMADE = {"CreateContainerError", "CreateContainerConfigError", "RunContainerError"}
"""The kubelet cannot create or start the container."""
STORE = re.compile(r"\b((Store|StoreRefused|Refused|Denied|NoBucket)Error|StorageUnavailable)\b")
"""Errors of our processes about an object store."""
STUCK = {"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "NetworkNotReady"}
"""Reasons of Events while nothing of a pod runs yet."""

CERTIFICATES = "certificates"
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


class Blocker(NamedTuple):
    """One thing that keeps a pod, a workload or a pool from working."""

    reason: str
    cause: str
    evidence: tuple[str, ...] = ()
    do: str = ""
    """Fix that is more specific than the advice for the reason; may be empty."""


PodCheck = Callable[[Manifest, Sequence[Manifest]], Blocker | None]


def is_ready(pod: Manifest) -> bool:
    """True if the pod answers its readiness probe."""
    return condition_of(pod, "Ready").get("status") == "True"


def first_blocker(pods: Iterable[Manifest], events: Sequence[Manifest]) -> Blocker | None:
    """The first blocker of some pods: the worst kind first, then by name."""
    staying = sorted((pod for pod in pods if not is_terminating(pod)), key=name_of)
    for look in POD_CHECKS:
        for pod in staying:
            blocker = look(pod, events_about(pod, events))
            if blocker is not None:
                return blocker
    return None


def _find_gated(pod: Manifest, _events: Sequence[Manifest]) -> Blocker | None:
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("reason") != "SchedulingGated":
        return None
    gates = ", ".join(gate["name"] for gate in pod["spec"].get("schedulingGates") or ())
    do = "admit its workload in the queue that holds it: kubectl get workloads, or free its quota"
    return Blocker("WaitingForQuota", f"{name_of(pod)} is held back by a gate", (gates,), do)


def _find_unschedulable(pod: Manifest, events: Sequence[Manifest]) -> Blocker | None:
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        words = scheduled.get("message") or "it says nothing"
        evidence = (f"scheduler: {words}", *_node_requirements(pod["spec"]))
        return Blocker("Unschedulable", f"no node takes {name_of(pod)}", evidence)
    if not scheduled and not pod["spec"].get("nodeName") and not events:
        cause = f"no scheduler has looked at {name_of(pod)} yet"
        return Blocker("Unschedulable", cause, (), "look whether the cluster's scheduler runs")
    return None


def _node_requirements(spec: Manifest) -> Iterator[str]:
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


def _find_unpulled(pod: Manifest, events: Sequence[Manifest]) -> Blocker | None:
    for container in _starting_containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in PULLS:
            # A container that backs off repeats itself; the words of the registry are in an Event.
            words = _last_message(events, {"Failed"}, "Failed to pull") or waiting.get(
                "message", ""
            )
            cause = f"the image of {name_of(pod)} cannot be pulled: {container['image']}"
            return Blocker("ImagePullFailed", cause, (f"kubelet: {words}",), _pull_fix(words))
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


def _find_uncreated(pod: Manifest, events: Sequence[Manifest]) -> Blocker | None:
    for container in _starting_containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in UNMADE:
            words = waiting.get("message") or _last_message(events, {"Failed"})
            cause = f"the container of {name_of(pod)} cannot be started"
            return Blocker(waiting["reason"], cause, (f"kubelet: {words}",), _missing_fix(words))
    return None


def _find_stuck(pod: Manifest, events: Sequence[Manifest]) -> Blocker | None:
    is_waiting = any("waiting" in each.get("state", {}) for each in containers(pod))
    words = _last_message(events, STUCK)
    if is_waiting and words:
        cause = f"{name_of(pod)} has a node, but nothing of it starts"
        return Blocker("FailedMount", cause, (f"kubelet: {words}",), _missing_fix(words))
    return None


def _missing_fix(words: str) -> str:
    if "secret" in words and "not found" in words:
        return "create the Secret that is named, in the namespace of the pod"
    if "configmap" in words and "not found" in words:
        return "the operator makes this ConfigMap: look whether it runs"
    if "seccomp" in words:
        return "copy the profile to /var/lib/kubelet/seccomp of every node: see Run on a cluster"
    return "put right what the kubelet names"


def _find_crashing(pod: Manifest, _events: Sequence[Manifest]) -> Blocker | None:
    for container in containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        ended = terminated_state(container)
        is_down = "running" not in container.get("state", {})
        if waiting.get("reason") in CRASHES or (ended and is_down and ended.get("exitCode")):
            count = container.get("restartCount", 0)
            times = f", {count} restarts" if count else ""
            end = ContainerEnd(
                name_of(pod), ended.get("exitCode"), ended.get("message") or "", times
            )
            return end.blocker("CrashLooping", is_out_of_memory=ended.get("reason") == "OOMKilled")
    return None


class ContainerEnd(NamedTuple):
    """End of a role's process."""

    pod: str
    exit_code: int | None
    words: str
    """The end of its log."""
    times: str = ""
    """Number of restarts, as the end of a sentence."""

    def blocker(self, reason: str, *, is_out_of_memory: bool = False) -> Blocker:
        """The blocker of this end; a failure of the object store has a reason of its own."""
        lines = [line.strip() for line in self.words.splitlines() if line.strip()]
        evidence = (f"its last line: {lines[-1]}",) if lines else ()
        if lines and STORE.search(lines[-1]):
            cause = f"{self.pod} cannot use the object store{self.times}"
            return Blocker("StorageUnavailable", cause, evidence)
        code = "" if self.exit_code is None else f" with exit code {self.exit_code}"
        why = "out of memory" if is_out_of_memory else EXITS.get(self.exit_code or 0, "")
        meaning = f" ({why})" if why else ""
        return Blocker(reason, f"{self.pod} ended{code}{meaning}{self.times}", evidence)


def _find_uncertified(pod: Manifest, _events: Sequence[Manifest]) -> Blocker | None:
    """The certificate sidecar starts before every other container of the pod."""
    sidecars = pod.get("status", {}).get("initContainerStatuses") or ()
    if not any(each["name"] == CERTIFICATES and not each.get("started") for each in sidecars):
        return None
    log = f"kubectl logs {name_of(pod)} -c {CERTIFICATES}"
    do = f"{log} says why; see docs/runbooks/certificates-expire.md"
    return Blocker("PodsNotReady", f"{name_of(pod)} has no certificate yet", (), do)


def _find_starting(pod: Manifest, events: Sequence[Manifest]) -> Blocker | None:
    if is_ready(pod) or pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
        return None
    words = _last_message(events, {"Unhealthy"}) or _last_message(events, {"Pulling"})
    evidence = (f"kubelet: {words}",) if words else ()
    return Blocker("PodsNotReady", f"{name_of(pod)} is starting", evidence)


def _starting_containers(pod: Manifest) -> list[Manifest]:
    """Status of each container in the order of their start: sidecars have the role's image."""
    return [*(pod.get("status", {}).get("initContainerStatuses") or ()), *containers(pod)]


def containers(pod: Manifest) -> Sequence[Manifest]:
    """Status of each container of the role, as the kubelet wrote it."""
    found: Sequence[Manifest] = pod.get("status", {}).get("containerStatuses") or ()
    return found


def terminated_state(container: Manifest) -> Manifest:
    """The terminated state of a container, now or before its last restart; empty without one."""
    for state in (container.get("state"), container.get("lastState")):
        ended: Manifest | None = (state or {}).get("terminated")
        if ended:
            return ended
    return {}


def _last_message(events: Sequence[Manifest], reasons: set[str], start: str = "") -> str:
    """The newest message of these reasons, or an empty string."""
    found = [
        str(each.get("message", ""))
        for each in sorted(events, key=event_time)
        if each.get("reason") in reasons and str(each.get("message", "")).startswith(start)
    ]
    return found[-1] if found else ""


POD_CHECKS: tuple[PodCheck, ...] = (
    *(
        _find_gated,
        _find_unschedulable,
        _find_unpulled,
        _find_uncreated,
        _find_crashing,
        _find_stuck,
        _find_uncertified,
        _find_starting,
    ),
)
"""The checks of a pod, the worst blocker first."""
