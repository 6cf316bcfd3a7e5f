"""Observation of a run through kubectl."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from etude.cli.kubectl.client import CHECKPOINTS, POOLS, RUNS, Kubectl, Manifest
from etude.cli.kubectl.seen import Seen, seen_of
from etude.cli.output import say
from etude.common.errors import Problem, UserError

AROUND = (f"{POOLS},{CHECKPOINTS}", "pods,statefulsets.apps", "events")
"""Kinds around a run, grouped by the rights to list them."""


class Listed(NamedTuple):
    """Objects of some kinds, and the refusals for others."""

    items: list[Manifest]
    refused: tuple[Problem, ...] = ()


def gather(kubectl: Kubectl, name: str, told: set[str] | None = None) -> Seen:
    """Observe a run and the objects around it, without kinds that may not be listed.

    Args:
        kubectl: client of the cluster.
        name: of the run.
        told: refusals that were reported before; new ones are added.

    Raises:
        UserError: there is no such run, or the API server does not answer.
    """
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(_listed, kubectl, kinds) for kinds in AROUND]
        run = kubectl.get(RUNS, name)
        own, workloads, events = (_told(each.result(), told) for each in asked)
    return seen_of(run, [*own, *workloads], events)


def gather_all(kubectl: Kubectl, scope: Sequence[str]) -> list[Seen]:
    """Observe every run of a namespace, or of all.

    Raises:
        UserError: runs may not be listed, or the API server does not answer.
    """
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(_listed, kubectl, kinds, *scope) for kinds in AROUND[:2]]
        runs = kubectl.items(RUNS, *scope)
        around = [each for part in asked for each in _told(part.result())]
    return [
        seen_of(run, [each for each in around if _namespace(each) == _namespace(run)])
        for run in runs
    ]


def _told(listed: Listed, told: set[str] | None = None) -> list[Manifest]:
    known = set() if told is None else told
    for problem in listed.refused:
        if problem.what not in known:
            known.add(problem.what)
            say(f"{problem.what}: what follows leaves them out")
    return listed.items


def _namespace(manifest: Manifest) -> str:
    return str(manifest["metadata"]["namespace"])


def _listed(kubectl: Kubectl, kinds: str, *scope: str) -> Listed:
    try:
        return Listed(kubectl.items(kinds, *scope))
    except UserError as error:
        if error.problem.reason != "Forbidden":
            raise
        if "," not in kinds:
            return Listed([], (error.problem,))
        parts = [_listed(kubectl, kind, *scope) for kind in kinds.split(",")]
        items = [item for part in parts for item in part.items]
        return Listed(items, tuple(each for part in parts for each in part.refused))
