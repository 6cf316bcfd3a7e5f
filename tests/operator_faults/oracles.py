"""What must be true of a history, whatever went wrong on the way."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.operator_faults.observer import Event

from etude.operator import names
from etude.operator.manifests import Manifest, Ref, is_true, labels, uid

Paths = dict[str, Any]

RECORD = re.compile(r"^\S+ [\d:,]+ (?P<level>[A-Z]+) (?P<source>\S+) ")
"""The first line of one record of a log."""

CALLBACK = re.compile(r" asyncio Exception in callback \S+.* at \S+/kopf/\S+$")
"""kopf 1.45 asks for the current task in a callback, which has none."""

TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$")
UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
ADDRESS = re.compile(r"127\.\d+\.\d+\.\d+")
JOB = re.compile(r"-[0-9a-f]{8}-(ver|del)(-[a-z0-9]{5})?$")
"""Jobs carry a hash of a uid, their pods a random word more."""
REPEATABLE = re.compile(r"(Job|Pod|NetworkPolicy)/\S+-del$")
"""Data may be deleted twice: a Job that is over is taken away before its checkpoint is let go."""
THEIRS = {"kube-root-ca.crt"}
VOLATILE = {
    *("resourceVersion", "managedFields", "creationTimestamp", "deletionTimestamp", "generation"),
    *("nodeName", "clusterIP", "clusterIPs", "observedGeneration"),
    # How long it took.
    *("active", "ettr", "usage", "productiveSeconds", "reported", "provision"),
    *("controller-revision-hash", "currentRevision", "updateRevision", "collisionCount"),
}


MEASURED = {"startupSeconds"}
"""It must be known in the end, and is another number in every run."""


def stable_name(key: Ref) -> str:
    """What an object is called in every run of the same plan."""
    name = JOB.sub(r"-\1", key.name)
    return f"{key.kind}/{name}"


def state(objects: Mapping[Ref, Manifest]) -> Paths:
    """Every leaf of every object, by its path, without what differs by nature."""
    found: Paths = {}
    for key, manifest in objects.items():
        if key.name not in THEIRS:
            found |= _leaves(stable_name(key), manifest, key.namespace)
    return found


def _leaves(path: str, value: Any, namespace: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            if key in MEASURED:
                yield f"{path}.{key}", "<measured>"
            elif key not in VOLATILE:
                yield from _leaves(f"{path}.{key}", value[key], namespace)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}[{number}]", item, namespace)
    elif isinstance(value, str):
        text = ADDRESS.sub("<address>", UID.sub("<uid>", value.replace(namespace, "<namespace>")))
        yield path, "<time>" if TIME.match(value) else text
    else:
        yield path, value


def digest(events: Sequence[Event]) -> Counter[str]:
    """How often each object was made and taken away."""
    seen: set[str] = set()
    found: Counter[str] = Counter()
    for event in events:
        name = stable_name(event.ref)
        if uid(event.manifest) not in seen:
            seen.add(uid(event.manifest))
            found[f"make {name}"] += 1
        if event.type == "DELETED":
            found[f"lose {name}"] += 1
    return found


@dataclass(frozen=True, slots=True)
class Reference:
    """What runs without a fault came to."""

    state: Paths
    varying: frozenset[str]
    """Paths in which they differ among themselves."""
    digest: Counter[str]
    """The most of each."""
    writes: int
    """The fewest counted writes of any."""

    def differences(self, objects: Mapping[Ref, Manifest]) -> list[str]:
        """Where a state is not the reference."""
        found = {k: v for k, v in state(objects).items() if k not in self.varying}
        return [
            f"{path}: {found.get(path)!r} instead of {self.state.get(path)!r}"
            for path in sorted(found.keys() | self.state.keys())
            if found.get(path) != self.state.get(path)
        ]

    def excess(self, events: Sequence[Event]) -> list[str]:
        """What was made or taken away more often than without a fault."""
        return [
            f"{what}: {times} times instead of {self.digest[what]}"
            for what, times in sorted(digest(events).items())
            if times > self.digest[what] and not REPEATABLE.search(what)
        ]


def reference(states: Sequence[Paths], digests: Sequence[Counter[str]], writes: int) -> Reference:
    """Of several runs without a fault."""
    paths = set[str]().union(*states)
    varying = frozenset(
        path for path in paths if any(each.get(path) != states[0].get(path) for each in states)
    )
    same = {path: value for path, value in states[0].items() if path not in varying}
    most: Counter[str] = Counter()
    for each in digests:
        most |= each
    return Reference(same, varying, most, writes)


class Safety:
    """What holds in every state in between; feed it one event after the other."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self._objects: dict[Ref, Manifest] = {}

    def see(self, event: Event) -> None:
        """Judge the state after one event."""
        before = self._objects.get(event.ref)
        if event.type == "DELETED":
            self._objects.pop(event.ref, None)
        else:
            self._objects[event.ref] = event.manifest
        if event.ref.kind == "RLRun" and event.type != "DELETED":
            self._run(event, before)
        if event.ref.kind == "Pod" and event.type != "DELETED":
            self._pod(event, before)

    def _run(self, event: Event, before: Manifest | None) -> None:
        run = event.manifest
        if is_true(run, "Complete") and is_true(run, "Failed"):
            self._say(event, "is both Complete and Failed")
        if before is not None and uid(before) == uid(run):
            for kind in ("Complete", "Failed"):
                if is_true(before, kind) and not is_true(run, kind):
                    self._say(event, f"is {kind} no more")
            if _number(run, "attempt") < _number(before, "attempt"):
                self._say(event, "has fewer attempts than before")
            if _number(run, "observedGeneration") < _number(before, "observedGeneration"):
                self._say(event, "observes an older generation than before")
        if is_true(run, "Suspended") and run["spec"].get("suspend") and self._pods_of(run):
            self._say(event, f"is Suspended with {self._pods_of(run)}")

    def _pod(self, event: Event, before: Manifest | None) -> None:
        if before is None:
            pool = labels(event.manifest).get(names.POOL)
            if labels(event.manifest).get(names.ROLE) == names.HOST and pool:
                self._node(event, pool)
        key = Ref("RLRun", event.ref.namespace, labels(event.manifest).get(names.RUN, ""))
        run = self._objects.get(key)
        if run is not None and is_true(run, "Suspended") and run["spec"].get("suspend"):
            self._say(event, "is a pod of a run that is Suspended")

    def _node(self, event: Event, name: str) -> None:
        """A pool never holds more nodes than it may, those on their way out too."""
        pool = self._objects.get(Ref("EnvPool", event.ref.namespace, name))
        nodes = [
            key
            for key, pod in self._objects.items()
            if labels(pod).get(names.POOL) == name
            and labels(pod).get(names.ROLE) == names.HOST
            and key.kind == "Pod"
            and not pod["metadata"].get("deletionTimestamp")
        ]
        if pool is not None and len(nodes) > pool["spec"].get("replicas", 0):
            self._say(event, f"is one node too many: {sorted(nodes)}")

    def _pods_of(self, run: Manifest) -> list[str]:
        return [
            key.name
            for key, pod in self._objects.items()
            if key.kind == "Pod" and labels(pod).get(names.RUN) == run["metadata"]["name"]
        ]

    def _say(self, event: Event, what: str) -> None:
        self.broken.append(f"{event.version} {event.ref.kind}/{event.ref.name} {what}")


def _number(run: Manifest, name: str) -> int:
    found: int = run.get("status", {}).get(name, 0)
    return found


def unsafe(events: Sequence[Event]) -> list[str]:
    """Every state of a history that should never have been."""
    judge = Safety()
    for event in events:
        judge.see(event)
    return judge.broken


def complaints(log: str) -> list[str]:
    """Lines of an operator's log that only a bug explains.

    kopf's are left out with their tracebacks: it ends, and says how, at answers that make no sense,
    and is begun anew by us. Whether that works is seen by the state that is reached. A callback of
    its own that fails while a request waits is reported by asyncio in its name.
    """
    found: list[str] = []
    source = ""
    for line in log.splitlines():
        record = RECORD.match(line)
        if record is not None:
            source = "kopf" if CALLBACK.search(line) else record["source"]
        is_loud = record is not None and record["level"] in {"ERROR", "CRITICAL"}
        is_raised = line.startswith("Traceback") and not source.startswith("kopf")
        if is_raised or (is_loud and source.startswith("etude")):
            found.append(line)
    return found
