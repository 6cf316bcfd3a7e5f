"""Gathers what is known of a run, through kubectl."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from etude.cli.kubectl.client import CHECKPOINTS, POOLS, RUNS, Kubectl, Manifest
from etude.cli.kubectl.seen import Seen, seen_of
from etude.cli.output import say
from etude.common.errors import UserError

AROUND = (f"{POOLS},{CHECKPOINTS}", "pods,statefulsets.apps", "events")
"""What stands around a run, by what one account may list and another not."""


def gather(kubectl: Kubectl, name: str) -> Seen:
    """The run and what stands around it; what we may not list is left out, and said.

    Raises:
        UserError: there is no such run, or nobody answers.
    """
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(_listed, kubectl, kinds) for kinds in AROUND]
        run = kubectl.get(RUNS, name)
        own, workloads, events = (each.result() for each in asked)
    return seen_of(run, [*own, *workloads], events)


def gather_all(kubectl: Kubectl, scope: Sequence[str]) -> list[Seen]:
    """Every run of a namespace, or of all.

    Raises:
        UserError: we may not list them, or nobody answers.
    """
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(_listed, kubectl, kinds, *scope) for kinds in AROUND[:2]]
        runs = kubectl.items(RUNS, *scope)
        around = [each for part in asked for each in part.result()]
    return [
        seen_of(run, [each for each in around if _namespace(each) == _namespace(run)])
        for run in runs
    ]


def _namespace(manifest: Manifest) -> str:
    return str(manifest["metadata"]["namespace"])


def _listed(kubectl: Kubectl, kinds: str, *scope: str) -> list[Manifest]:
    try:
        return kubectl.items(kinds, *scope)
    except UserError as error:
        if error.problem.reason != "Forbidden":
            raise
        say(f"{error.problem.what}: what follows leaves them out")
        return []
