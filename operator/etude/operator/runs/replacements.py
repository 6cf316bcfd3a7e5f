"""Pods of earlier attempts, which make room for those of the present one."""

from collections.abc import Iterable, Iterator

from etude.common.api.kinds import RLRun
from etude.operator import names
from etude.operator.actions import Action, Delete
from etude.operator.manifests import Manifest, is_deleting, labels, ref, uid
from etude.operator.reasons import Reason
from etude.operator.runs import commands, intents, undertakings
from etude.operator.runs.seen import Seen
from etude.v1 import run_pb2

STUCK_GRACE_S = 30
"""A trainer that finished nothing for so long will not save a checkpoint on its way out."""


def replacements(run: RLRun, seen: Seen) -> Iterator[Action]:
    """Send the pods of earlier attempts away; their StatefulSet makes the new ones."""
    intent = run.status.intent
    if intent is None:
        yield from _gone(_left_over(run, seen))
    elif intent.type == "Restart":
        old = [pod for pod in intents.restarting(intent, seen) if not _is_of(pod, intent.attempt)]
        is_stuck = intent.reason == Reason.NO_PROGRESS
        if is_stuck and any(not is_deleting(pod) for pod in old):
            order = run_pb2.CommandRequest(dump_stacks=run_pb2.DumpStacks())
            yield commands.order(run, order, "dump", intent.attempt)
        yield from _gone(old, STUCK_GRACE_S if is_stuck else None)


def _left_over(run: RLRun, seen: Seen) -> Iterator[Manifest]:
    """Those that a StatefulSet's controller made once more as they were.

    It may not have seen the new template yet when the old pod goes. Nobody counts on such a pod,
    and nobody else would ever replace it.
    """
    for role, attempt in undertakings.attempts_of(run).items():
        yield from (pod for pod in seen.pods.get(role, ()) if not _is_of(pod, attempt))


def _is_of(pod: Manifest, attempt: int) -> bool:
    return labels(pod).get(names.ATTEMPT, "0") == str(attempt)


def _gone(pods: Iterable[Manifest], grace_s: int | None = None) -> Iterator[Delete]:
    yield from (Delete(ref(pod), uid(pod), grace_s) for pod in pods if not is_deleting(pod))
