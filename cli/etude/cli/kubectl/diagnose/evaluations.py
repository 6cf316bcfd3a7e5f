"""Diagnosis of an evaluation: the first cause that keeps it from its result."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from etude.cli.kubectl.client import EVALUATIONS, POOLS, Kubectl
from etude.cli.kubectl.diagnose import pods
from etude.cli.kubectl.diagnose.advice import advice
from etude.cli.kubectl.diagnose.diagnosis import (
    CANDIDATE_WAITS,
    STANDS_STILL,
    USERS_UNSERVED,
    Diagnosis,
    RunState,
    last_line,
)
from etude.cli.kubectl.diagnose.pods import Blocker
from etude.cli.kubectl.diagnose.run_objects import POOL, ROLE, list_kinds, report_refusals
from etude.cli.kubectl.diagnose.workloads import find_pool_blocker, missing_pool, workload_blocker
from etude.cli.kubectl.manifests import (
    Manifest,
    condition_of,
    is_terminating,
    labels_of,
    name_of,
)

EVALUATION = "etude.dev/evaluation"
PASSING = frozenset({"PodsNotReady", "PoolWarming", "BrokerNotReady"})
"""Reasons that usually pass without help."""
_AROUND = (f"{EVALUATIONS},{POOLS}", "pods,statefulsets.apps,replicasets.apps", "events")
"""Kinds around a route or an evaluation, grouped by the rights to list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceObjects:
    """Objects of a namespace that routes and evaluations depend on."""

    evaluations: Sequence[Manifest] = ()
    pools: Sequence[Manifest] = ()
    pods: Sequence[Manifest] = ()
    sets: Sequence[Manifest] = ()
    """Owners of pods."""
    events: Sequence[Manifest] = ()

    def blockers(self, label: str, name: str) -> Iterator[Blocker]:
        """Blockers of workloads, and one of each role; those that pass by themselves last."""
        of_workload = workload_blocker(_labelled(self.sets, label, name), self.events)
        if of_workload is not None:
            yield of_workload
        by_role: dict[str, list[Manifest]] = {}
        for pod in _labelled(self.pods, label, name):
            if not pods.is_ready(pod):
                by_role.setdefault(labels_of(pod).get(ROLE, ""), []).append(pod)
        found = (pods.first_blocker(each, self.events) for _, each in sorted(by_role.items()))
        blockers = [_without_run(each) for each in found if each is not None]
        yield from sorted(blockers, key=lambda each: each.reason in PASSING)


def _labelled(manifests: Sequence[Manifest], label: str, name: str) -> list[Manifest]:
    return [each for each in manifests if labels_of(each).get(label) == name]


def _without_run(blocker: Blocker) -> Blocker:
    """The blocker with a fix that names its pod: there is no run whose logs could be shown."""
    do = blocker.do or advice(blocker.reason).do
    if "{run}" in do:
        is_starting = blocker.reason in PASSING
        do = (
            "an engine or a large image takes minutes; kubectl logs POD shows how far it is"
            if is_starting
            else "kubectl logs POD --previous shows how it ended"
        )
    return blocker._replace(do=do)


def observe_namespace(kubectl: Kubectl) -> NamespaceObjects:
    """Observe a namespace, without kinds that may not be listed.

    Raises:
        UserError: the API server does not answer.
    """
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(list_kinds, kubectl, kinds) for kinds in _AROUND]
        own, workloads, events = (report_refusals(each.result()) for each in asked)
    return NamespaceObjects(
        evaluations=[each for each in own if each["kind"] == "EvalRun"],
        pools=[each for each in own if each["kind"] == "EnvPool"],
        pods=[each for each in workloads if each["kind"] == "Pod"],
        sets=[each for each in workloads if each["kind"] != "Pod"],
        events=events,
    )


def diagnose_evaluation(evaluation: Manifest, around: NamespaceObjects) -> Diagnosis:
    """Diagnose an evaluation: the first cause that keeps it from its result, if there is one."""
    about = name_of(evaluation)
    ended = _find_end(evaluation)
    if ended is not None:
        return ended
    refused = refused_blocker(evaluation)
    if refused is not None:
        is_passing = refused.reason in {"WaitingForBaseline", "ClusterUnavailable", "Terminating"}
        state = RunState.WAITS if is_passing else RunState.STANDS_STILL
        evidence = _describe_baseline(evaluation, around)
        return make_diagnosis("evaluation", about, state, refused, *evidence)
    blockers = [*around.blockers(EVALUATION, about), *_pool_blockers(evaluation, around)]
    blockers.sort(key=lambda each: each.reason in PASSING)
    if blockers:
        first, *others = blockers
        state = RunState.WAITS if first.reason in PASSING else RunState.STANDS_STILL
        evidence = (f"also, {each.cause}" for each in others)
        return make_diagnosis("evaluation", about, state, first, *evidence)
    running = condition_blocker(condition_of(evaluation, "Complete"))
    return make_diagnosis("evaluation", about, RunState.PROGRESSES, running)


def _find_end(evaluation: Manifest) -> Diagnosis | None:
    for kind, state in (("Failed", RunState.FAILED), ("Complete", RunState.OVER)):
        ended = condition_of(evaluation, kind)
        if ended.get("status") == "True":
            name = name_of(evaluation)
            return make_diagnosis("evaluation", name, state, condition_blocker(ended))
    return None


def refused_blocker(manifest: Manifest) -> Blocker | None:
    """The reason for which nothing is made of an object; None where its parts are made."""
    if is_terminating(manifest):
        return Blocker("Terminating", advice("Terminating").means)
    generation = int(manifest["metadata"].get("generation", 0))
    seen = int(manifest.get("status", {}).get("observedGeneration", 0))
    if seen < generation:
        evidence = (f"observed generation {seen} of {generation}",)
        cause = f"the operator has seen {'an older spec' if seen else 'nothing'} of it"
        return Blocker("OperatorSilent", cause, evidence)
    accepted = condition_of(manifest, "Accepted")
    return condition_blocker(accepted) if accepted.get("status") == "False" else None


def condition_blocker(condition: Manifest) -> Blocker:
    """The blocker with a condition as its cause."""
    reason = str(condition.get("reason") or "Evaluating")
    known = advice(reason, str(condition.get("type", "")))
    words = last_line(str(condition.get("message") or ""))
    return Blocker(reason, known.means, (words,) if words else (), known.do)


def make_diagnosis(
    kind: str, name: str, state: RunState, blocker: Blocker, *more: str
) -> Diagnosis:
    """The diagnosis of a route or an evaluation with a blocker as its cause."""
    known = advice(blocker.reason)
    of_kind = CANDIDATE_WAITS if kind == "evaluation" else USERS_UNSERVED
    return Diagnosis(
        kind=kind,
        name=name,
        state=state,
        reason=blocker.reason,
        cause=blocker.cause,
        evidence=(*blocker.evidence, *more),
        do=(blocker.do or known.do).replace("{run}", name),
        runbook=of_kind if known.runbook == STANDS_STILL else known.runbook,
    )


def _describe_baseline(evaluation: Manifest, around: NamespaceObjects) -> Iterator[str]:
    """The evaluation that another one waits for, in words."""
    wanted = (evaluation["spec"].get("comparison") or {}).get("baselineRef", {}).get("name")
    for each in around.evaluations:
        if name_of(each) == wanted:
            yield diagnose_evaluation(each, around).sentence


def _pool_blockers(evaluation: Manifest, around: NamespaceObjects) -> Iterator[Blocker]:
    there = {name_of(pool): pool for pool in around.pools}
    for environment in evaluation["spec"].get("environments") or ():
        name = str(environment["poolRef"]["name"])
        pool = there.get(name)
        if pool is None:
            yield missing_pool(name)
            continue
        blocker = find_pool_blocker(pool, _labelled(around.pods, POOL, name), around.events)
        if blocker is not None:
            yield _without_run(blocker)
