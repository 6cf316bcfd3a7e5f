"""Disruptions and replacement of pods.

Pods that the platform evicts, drains or preempts are counted but never held against the run; pods
of earlier attempts are deleted to be replaced.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import Restarts
from etude.operator import names
from etude.operator.actions import Action, Delete
from etude.operator.manifests import Manifest, is_deleting, is_true, labels, ref, uid
from etude.operator.pod_failures import DISRUPTION
from etude.operator.reasons import Reason
from etude.operator.runs.lifecycle import commands, transitions
from etude.operator.runs.observe import ObservedRun
from etude.v1 import run_pb2

STUCK_GRACE_S = 30
"""A stalled trainer will not save a checkpoint while it terminates."""

STARTING_GRACE_S = 5
"""The first process of a container hears no signal before it has a handler for it, and a pod that
starts has nothing to save."""

MAX_REMEMBERED = 256


def count_disruptions(restarts: Restarts, pods: Mapping[str, Sequence[Manifest]]) -> Restarts:
    """The restart counters with every disrupted pod counted once.

    Args:
        restarts: counters so far.
        pods: of the run, by role.
    """
    disrupted_now = [
        uid(pod) for of_role in pods.values() for pod in of_role if is_true(pod, DISRUPTION)
    ]
    known = [each for each in restarts.disrupted if each in disrupted_now]
    # What there is no room to remember is counted once there is, so that nothing is counted twice.
    new = [each for each in disrupted_now if each not in known][: MAX_REMEMBERED - len(known)]
    disrupted = (*known, *new)
    if disrupted == restarts.disrupted:
        return restarts
    return restarts.model_copy(update={"infra": restarts.infra + len(new), "disrupted": disrupted})


def hurry_starting_pods(pods: Mapping[str, Sequence[Manifest]]) -> Iterator[Delete]:
    """Delete terminating pods that are still starting, with a short grace period."""
    for of_role in pods.values():
        for pod in of_role:
            grace_s = pod["metadata"].get("deletionGracePeriodSeconds", 0)
            if is_deleting(pod) and grace_s > STARTING_GRACE_S and is_starting(pod):
                yield Delete(ref=ref(pod), uid=uid(pod), grace_s=STARTING_GRACE_S)


def is_starting(pod: Manifest) -> bool:
    """No container of a scheduled pod has answered its startup probe yet."""
    found = pod.get("status", {}).get("containerStatuses") or ()
    return bool(found) and all(
        container.get("started") is False and not container.get("restartCount")
        for container in found
    )


def replace_old_pods(run: RLRun, observed: ObservedRun) -> Iterator[Action]:
    """Delete pods of earlier attempts; their StatefulSet creates the new ones."""
    intent = run.status.intent
    if intent is None:
        # A StatefulSet's controller that has not seen the new template yet makes the old pod once
        # more. Nobody counts on that, and nobody else would ever replace it.
        yield from _delete_pods(_old_pods(observed, transitions.attempts_of(run)))
    elif intent.type == "Restart":
        roles = [intent.role] if intent.role else list(observed.pods)
        old = _old_pods(observed, dict.fromkeys(roles, intent.attempt))
        is_stuck = intent.reason == Reason.NO_PROGRESS
        if old and is_stuck:
            order = run_pb2.CommandRequest(dump_stacks=run_pb2.DumpStacks())
            yield commands.command(run, order, "dump", intent.attempt)
        yield from _delete_pods(old, STUCK_GRACE_S if is_stuck else None)


def _old_pods(observed: ObservedRun, attempts: Mapping[str, int]) -> list[Manifest]:
    """Running pods of earlier attempts whose workload already has the new template."""
    templates = {labels(m).get(names.ROLE): m["spec"]["template"] for m in observed.stateful_sets}
    return [
        pod
        for role, attempt in attempts.items()
        # While the cluster refuses the new template, the old pod would come back for ever.
        if role not in templates or _is_of_attempt(templates[role], attempt)
        for pod in observed.pods.get(role, ())
        if not _is_of_attempt(pod, attempt) and not is_deleting(pod)
    ]


def _is_of_attempt(made: Manifest, attempt: int) -> bool:
    return labels(made).get(names.ATTEMPT, "0") == str(attempt)


def _delete_pods(pods: Iterable[Manifest], grace_s: int | None = None) -> Iterator[Delete]:
    yield from (Delete(ref=ref(pod), uid=uid(pod), grace_s=grace_s) for pod in pods)
