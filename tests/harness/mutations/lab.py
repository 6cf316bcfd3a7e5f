"""One object in a namespace of its own, led from its base to a change and back."""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from tests.harness.mutations import schema, shown, state
from tests.harness.mutations.api import Api
from tests.harness.mutations.cases import Mutation, changed, dumped
from tests.harness.mutations.state import Manifest
from tests.support.kube.api_client import MERGE, Reply

from etude.common.api.schema import crd
from etude.operator.kube.rest import path_of

LIMIT_S = 300.0
"""For one change to be dealt with: a pass takes milliseconds, and a busy machine gets patience."""
LIVE = {
    "RLRun": {
        *("checkpointing", "evaluation", "failurePolicy", "deadlines", "budget", "network"),
        *("ttlSecondsAfterFinished", "deletionRules", "suspend", "managedBy"),
    },
    "EnvPool": {
        *("lease", "health", "search", "warm", "snapshotsUri"),
        *("autoscaling", "maxReplicas", "minIdle", "overcommitFactor"),
    },
}
"""Parts that change while the object works; for the others it is brought to rest first, also for
what is read as a pod starts."""
OPEN = re.compile(r"podTemplate|nodeSelector|env\[")
"""Where our schema leaves to the API server what a pod may be."""
MOST_PODS = 40
"""In a namespace: a list of a thousand replicas is a matter of numbers, not of pods."""
FULL = "exceeded quota: pods"


class Verdict(StrEnum):
    """What became of a change."""

    REFUSED = "refused by the API server"
    DECLINED = "declined in the status"
    SHOWN = "shown"
    ENDED = "ended the run"


class Outcome(NamedTuple):
    """What became of a change, and what is wrong with that."""

    mutation: Mutation
    verdict: Verdict
    faults: tuple[str, ...] = ()

    @property
    def leaves_disorder(self) -> bool:
        """Whether the object cannot serve for another change."""
        return bool(self.faults) or self.verdict is Verdict.ENDED


class NeverError(Exception):
    """Something did not happen in time."""


class Bench:
    """A namespace with the base object of one kind in it, and the state that it settled in."""

    def __init__(self, api: Api, kind: crd.CrdKind, variant: str = "") -> None:
        self.api, self.kind, self.variant = api, kind, variant
        self.namespace = f"{kind.short}-{uuid.uuid4().hex[:8]}"
        self._prepare()
        self.base = schema.base(kind, variant)
        reply = self._create(self.base)
        assert reply.is_good, reply.message
        self._settle()
        assert self._accepted().holds, self._accepted()
        self.home = self._steady()
        problems = list(shown.differences(self._live(), state.children(api, self.namespace)))
        assert not problems, problems

    def close(self) -> None:
        """Leave nothing that the operator or the controllers would go on with."""
        self.api.call("DELETE", f"/api/v1/namespaces/{self.namespace}")

    def refused(self, mutation: Mutation) -> Outcome | None:
        """The API server's refusal of a change; None if it takes it."""
        body = mutation.body()
        probe = {**body, "metadata": {**body["metadata"], "name": "probe"}}
        reply = self._create(probe, "dryRun=All")
        if reply.is_good:
            return None
        return Outcome(mutation, Verdict.REFUSED, tuple(unnamed(reply, mutation)))

    def tried(self, mutation: Mutation) -> Outcome:
        """What becomes of a change that the API server takes, and of its undoing."""
        body = mutation.body()
        is_live = mutation.top in {*LIVE[self.kind.name], ""}
        if not is_live:
            self._rest()
        reply = self._put(body)
        if not reply.is_good:
            faults = tuple(unnamed(reply, mutation))
            faults += tuple(self._home())
            return Outcome(mutation, Verdict.REFUSED, faults)
        verdict, faults = self._judged(mutation)
        if verdict is Verdict.ENDED:
            return Outcome(mutation, verdict)
        if not is_live:
            self._rest()
        return Outcome(mutation, verdict, (*faults, *self._home()))

    def _judged(self, mutation: Mutation) -> tuple[Verdict, tuple[str, ...]]:
        self._settle()
        if _is_over(self._live()):
            return Verdict.ENDED, ()
        accepted = self._accepted()
        if not accepted.holds:
            return Verdict.DECLINED, tuple(undeclared(accepted, mutation))
        try:
            self._until(lambda: not self._differences(), "every field shows")
        except NeverError:
            return Verdict.SHOWN, tuple(self._differences())
        return Verdict.SHOWN, ()

    def _differences(self) -> list[str]:
        found = state.children(self.api, self.namespace)
        return list(shown.differences(self._live(), found))

    def _home(self) -> Iterator[str]:
        """Back to the base; yields what is not as it was."""
        reply = self._put(self.base)
        if not reply.is_good:
            yield f"the way back is refused: {reply.message}"
            return
        self._settle()
        try:
            self._until(lambda: self._essence() == self.home, "the state of before")
        except NeverError:
            yield from (f"not as before{each}" for each in state.unlike(self.home, self._essence()))

    def _essence(self) -> dict[str, Any]:
        live, found = self._live(), state.children(self.api, self.namespace)
        if "autoscaling" in self.base["spec"]:  # how many there are is told by the hour
            found = {key: each for key, each in found.items() if key[0] != "Pod"}
            return state.essence(found)
        return {**state.essence(found), "conditions": state.conditions(live)}

    def _steady(self) -> dict[str, Any]:
        """The state once it has been the same for a second."""
        before: dict[str, Any] = {}

        def is_same() -> bool:
            nonlocal before
            now = self._essence()
            is_there = now == before and self._has_all_pods()
            before = now
            return is_there

        self._until(is_same, "a state that stays", every_s=1.0)
        return before

    def _has_all_pods(self) -> bool:
        found = state.children(self.api, self.namespace)
        sets = [each for (kind, _), each in found.items() if kind == "StatefulSet"]
        wanted = sum(each["spec"]["replicas"] for each in sets)
        return len([name for kind, name in found if kind == "Pod"]) >= int(wanted)

    def _rest(self) -> None:
        """Suspend a run, or take the nodes of a pool away."""
        field = {"suspend": True} if self.kind is crd.RLRUN else {"replicas": 0}
        path = path_of(self.kind.name, self.namespace, "base")
        reply = self.api.call("PATCH", path, json.dumps({"spec": field}), content=MERGE)
        assert reply.is_good, reply.message
        self._settle()
        if self.kind is crd.RLRUN:
            self._until(lambda: self._is("Suspended"), "the suspension")

    def _settle(self) -> None:
        """Until the operator has looked at the object as it is now, and at its pools."""
        self._until(self._is_observed, "observedGeneration catches up")

    def _is_observed(self) -> bool:
        live = self._live()
        if live["spec"].get("managedBy", "etude.dev/operator") != "etude.dev/operator":
            return True
        pools = self.api.listed("EnvPool", self.namespace) if self.kind is crd.RLRUN else ()
        return all(
            each.get("status", {}).get("observedGeneration") == each["metadata"]["generation"]
            for each in (live, *pools)
        )

    def _live(self) -> Manifest:
        return self.api.get(self.kind.name, self.namespace, "base")

    def _accepted(self) -> "Acceptance":
        """Whether the operator takes the object and its pools, and why not."""
        pools = self.api.listed("EnvPool", self.namespace) if self.kind is crd.RLRUN else ()
        verdicts = [_acceptance(each) for each in (self._live(), *pools)]
        return next((each for each in verdicts if not each.holds), verdicts[0])

    def _is(self, condition: str) -> bool:
        return state.conditions(self._live()).get(condition, ("", ""))[0] == "True"

    def _create(self, body: Manifest, query: str = "") -> Reply:
        path = path_of(self.kind.name, self.namespace) + f"?fieldValidation=Strict&{query}"
        return self.api.call("POST", path, dumped(body))

    def _put(self, body: Manifest) -> Reply:
        """Make the object what the body says; whoever wrote in between is overtaken."""
        path = path_of(self.kind.name, self.namespace, "base") + "?fieldValidation=Strict"
        while True:
            version = self._live()["metadata"]["resourceVersion"]
            metadata = {**body["metadata"], "namespace": self.namespace, "resourceVersion": version}
            reply = self.api.call("PUT", path, dumped({**body, "metadata": metadata}))
            if reply.status != 409:
                return reply

    def _until(self, holds: Callable[[], bool], what: str, every_s: float = 0.1) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():
            if time.monotonic() > deadline_s:
                live = json.dumps(self._live().get("status"))
                raise NeverError(f"{self.namespace}: never happened: {what}: {live}")
            time.sleep(every_s)

    def _prepare(self) -> None:
        labels = {"etude.dev/weak-isolation": "allow"}
        home = {"metadata": {"name": self.namespace, "labels": labels}}
        assert self.api.call("POST", "/api/v1/namespaces", json.dumps(home)).is_good
        quota = {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": str(MOST_PODS)}}}
        path = f"/api/v1/namespaces/{self.namespace}/resourcequotas"
        assert self.api.call("POST", path, json.dumps(quota)).is_good


class Acceptance(NamedTuple):
    """What a status says of an object's spec."""

    holds: bool
    reason: str
    message: str


def _acceptance(live: Manifest) -> Acceptance:
    for each in live.get("status", {}).get("conditions") or ():
        if each["type"] == "Accepted":
            return Acceptance(each["status"] == "True", each["reason"], each["message"])
    return Acceptance(live["kind"] == "Checkpoint", "", "there is no condition Accepted")


def _is_over(live: Manifest) -> bool:
    found = state.conditions(live)
    return any(found.get(kind, ("", ""))[0] == "True" for kind in ("Complete", "Failed"))


def unnamed(reply: Reply, mutation: Mutation) -> Iterator[str]:
    """What a refusal lacks: it has to be the API server's own, and to name the field."""
    if reply.status not in {400, 403, 413, 422}:
        yield f"answers {reply.status}: {reply.message[:300]}"
    # A number beyond every double ends the parsing of the whole, which names the number alone.
    number = re.search(r"cannot unmarshal number (\S+)", reply.message)
    is_number = number is not None and number[1] in dumped(mutation.value)
    if not is_number and not names(reply.message, mutation):
        yield f"does not name the field: {reply.message[:600]}"


def undeclared(accepted: Acceptance, mutation: Mutation) -> Iterator[str]:
    """What is wrong with the operator's word that it cannot do what the API server took.

    Where the schema knows what a child may hold, it says so before there is a child.
    """
    if FULL in accepted.message and _is_many(json.loads(dumped(mutation.value))):
        return  # our own wall, which names what there is too little of
    is_open = OPEN.search(mutation.path) is not None
    is_child = accepted.reason == "Refused"
    if is_child and not is_open:
        yield f"the schema takes what no child may have: {accepted.message[:600]}"
    # Of what is open the API server speaks in the child's words.
    if not names(accepted.message, mutation) and not (is_open and is_child):
        yield f"declines and does not name the field: {accepted.message[:600]}"


def _is_many(value: object) -> bool:
    """Whether there is a number in a value that the quota of a bench is too small for."""
    if isinstance(value, Mapping):
        return any(_is_many(each) for each in value.values())
    if isinstance(value, list):
        return any(_is_many(each) for each in value)
    return isinstance(value, int | float) and value > MOST_PODS / 2


def names(message: str, mutation: Mutation) -> bool:
    """Whether a message says which field was changed, or quotes its value beside what it is in."""
    if any(_has(message, name) for name in changed(mutation)):
        return True
    around = [step for step in mutation.steps[:-1] if isinstance(step, str)][-1:]
    value = mutation.value
    return (
        isinstance(value, str) and value != "" and all(_has(message, w) for w in (value, *around))
    )


def _has(message: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message) is not None
