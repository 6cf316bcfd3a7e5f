"""Checkpoints under change: what a Job is made of never changes, so each change is a new object."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from tests.harness.mutations import shown, state
from tests.harness.mutations.cases import Mutation
from tests.harness.mutations.lab import Bench, NeverError, Outcome, Verdict
from typing_extensions import override

from etude.operator.kube.rest import path_of

FIXED = ("runRef", "source", "reason", "parentRef")
"""What a checkpoint is; the API server keeps it."""


class CheckpointBench(Bench):
    """A namespace in which checkpoints are made, changed, changed back, and deleted."""

    @override
    def tried(self, mutation: Mutation) -> Outcome:
        body = mutation.body()
        faults = [*self._made_so(body), *self._edited(mutation, body)]
        return Outcome(mutation, Verdict.SHOWN, tuple(faults))

    def _made_so(self, body: state.Manifest) -> Iterator[str]:
        """A checkpoint that is like this from the start: its Job says so."""
        self._gone()
        reply = self._create(body)
        if not reply.is_good:
            yield f"taken in a trial, and then refused: {reply.message}"
            return
        try:
            self._until(self._is_dealt_with, "a Job that says the same, or why there is none")
            self._settle()
        except NeverError:
            yield from self._differences() or ["never settles"]

    def _is_dealt_with(self) -> bool:
        """Whether its Job says what it says, or its status names what the API server refuses."""
        refused = [
            each["message"]
            for each in self._live().get("status", {}).get("conditions") or ()
            if each["reason"] == "Refused"
        ]
        return "spec." in "".join(refused) if refused else not self._differences()

    def _edited(self, mutation: Mutation, body: state.Manifest) -> Iterator[str]:
        """The base becomes like this and is made the base again."""
        self._gone()
        assert self._create(self.base).is_good
        self._until(lambda: not self._differences(), "a Job")
        self._settle()
        before = self._essence()
        reply = self._put(body)
        is_fixed = mutation.top in {*FIXED, ""} and mutation.steps[0] == "spec"
        if not reply.is_good:
            if not is_fixed or "immutable" not in reply.message:
                yield f"the edit is refused: {reply.message}"
            return
        self._settle()
        if not self._put(self.base).is_good:
            yield "the way back is refused"
            return
        self._settle()
        try:
            self._until(lambda: self._essence() == before, "the state of before")
        except NeverError:
            yield from (f"not as before{each}" for each in state.unlike(before, self._essence()))

    def _gone(self) -> None:
        """No checkpoint and no Job is left; deletion of data is another test's."""
        path = path_of(self.kind.name, self.namespace, "base")
        self.api.call("DELETE", path)
        off = json.dumps({"metadata": {"finalizers": None}})
        while self.api.call("GET", path).is_good:
            self.api.call("PATCH", path, off, content="application/merge-patch+json")
        for job in self.api.listed("Job", self.namespace):
            where = path_of("Job", self.namespace, job["metadata"]["name"])
            self.api.call("DELETE", f"{where}?propagationPolicy=Background")

    @override
    def _differences(self) -> list[str]:
        return list(shown.differences(self._live(), self._jobs()))

    @override
    def _essence(self) -> dict[str, Any]:
        live = self._live()
        held = live["metadata"].get("finalizers")
        return {**state.essence(self._jobs()), "conditions": state.conditions(live), "held": held}

    def _jobs(self) -> dict[tuple[str, str], state.Manifest]:
        """Those of this very object, and of none that had its name before."""
        mark = hashlib.sha256(self._live()["metadata"]["uid"].encode()).hexdigest()[:8]
        found = state.children(self.api, self.namespace)
        return {key: each for key, each in found.items() if key[0] == "Job" and mark in key[1]}
