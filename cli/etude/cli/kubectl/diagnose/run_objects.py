"""Observed objects of a run: the run, its pools, checkpoints, pods, workloads and Events."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from etude.cli.kubectl.client import CHECKPOINTS, POOLS, RUNS, Kubectl
from etude.cli.kubectl.durations import parse_time
from etude.cli.kubectl.manifests import Manifest, labels_of, name_of
from etude.cli.output import say
from etude.common.api.run.status import RLRunStatus
from etude.common.errors import Problem, UserError

RUN = "etude.dev/run"
POOL = "etude.dev/pool"
ROLE = "etude.dev/role"
ATTEMPT = "etude.dev/attempt"
TRAINER = "trainer"
KINDS = {"EnvPool": "pools", "Checkpoint": "checkpoints", "Pod": "pods", "StatefulSet": "sets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObjects:
    """A run and the objects around it, as the API server shows them."""

    run: Manifest
    pools: Sequence[Manifest] = ()
    """Those that the run uses and that exist."""
    checkpoints: Sequence[Manifest] = ()
    """Those of the run, newest first."""
    pods: Sequence[Manifest] = ()
    """Those of the run and of its pools."""
    sets: Sequence[Manifest] = ()
    """StatefulSets of the run and of its pools."""
    events: Sequence[Manifest] = ()
    """All Events of the namespace; each names its object by uid."""

    @property
    def name(self) -> str:
        """The run's name."""
        return name_of(self.run)

    @property
    def status(self) -> RLRunStatus:
        """The run's status.

        Raises:
            UserError: an operator of another version wrote a status that cannot be read here.
        """
        try:
            return RLRunStatus.parse_known_fields(self.run.get("status") or {})
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in ("status", *first["loc"]))
            fix = "install the version of etude that the operator has"
            problem = Problem("InvalidSpec", f"{at}: {first['msg']}", f"run {self.name}", fix)
            raise UserError(problem) from error

    @property
    def is_readable(self) -> bool:
        """True if the run's status can be read."""
        with suppress(UserError):
            return self.status is not None
        return False

    @property
    def samples_now(self) -> bool:
        """True if the active phase needs engines, environments and rewards."""
        phases = self.run["spec"].get("phases") or [{}]
        active = (self.run.get("status") or {}).get("activePhase") or phases[0].get("name")
        return any(
            each.get("type") == "ReinforcementLearning"
            for each in phases
            if each.get("name") == active
        )

    def pods_of(self, pool: str | None = None) -> list[Manifest]:
        """The run's own pods, or those of one of its pools."""
        label, wanted = (RUN, self.name) if pool is None else (POOL, pool)
        own = [pod for pod in self.pods if labels_of(pod).get(label) == wanted]
        return own if pool is not None else [pod for pod in own if POOL not in labels_of(pod)]


def pool_names(run: Manifest) -> list[str]:
    """The pools of a run's environments: from the spec if it names them, else from the status."""
    status = run.get("status") or {}
    known = {each["name"]: each["pool"] for each in status.get("environments") or ()}
    found = []
    for role in run["spec"].get("roles", {}).get("environments") or ():
        given = (role.get("poolRef") or {}).get("name") or known.get(role["name"])
        if given and given not in found:
            found.append(given)
    return found


def sort_objects(
    run: Manifest, around: Sequence[Manifest], events: Sequence[Manifest] = ()
) -> RunObjects:
    """Sort the objects of a namespace by their relation to a run."""
    mine = name_of(run)
    pools = pool_names(run)
    found: dict[str, list[Manifest]] = {field: [] for field in KINDS.values()}
    for each in around:
        if _belongs(each, mine, pools):
            found[KINDS[each["kind"]]].append(each)
    found["checkpoints"].sort(key=_saved, reverse=True)
    return RunObjects(
        run=run,
        pools=found["pools"],
        checkpoints=found["checkpoints"],
        pods=found["pods"],
        sets=found["sets"],
        events=events,
    )


def _belongs(each: Manifest, run: str, pools: Sequence[str]) -> bool:
    match each["kind"]:
        case "EnvPool":
            return name_of(each) in pools
        case "Checkpoint":
            return bool((each["spec"].get("runRef") or {}).get("name") == run)
        case "Pod" | "StatefulSet":
            return labels_of(each).get(RUN) == run or labels_of(each).get(POOL) in pools
        case _:
            return False


def _saved(checkpoint: Manifest) -> tuple[int, str]:
    created = checkpoint["metadata"].get("creationTimestamp") or ""
    return checkpoint_facts(checkpoint)["step"], created


def checkpoint_facts(checkpoint: Manifest) -> Manifest:
    """Step, policy version and bytes of a checkpoint, from its status or its spec."""
    spec, status = checkpoint["spec"], checkpoint.get("status") or {}
    names = ("step", "policyVersion", "sizeBytes")
    return {name: int(status.get(name) or spec.get(name) or 0) for name in names}


AROUND = (f"{POOLS},{CHECKPOINTS}", "pods,statefulsets.apps", "events")
"""Kinds around a run, grouped by the rights to list them."""


class ListedObjects(NamedTuple):
    """Objects of some kinds, and the refusals for others."""

    items: list[Manifest]
    refused: tuple[Problem, ...] = ()


def observe_run(kubectl: Kubectl, name: str, told: set[str] | None = None) -> RunObjects:
    """Observe a run and the objects around it, without kinds that may not be listed.

    Args:
        kubectl: client of the cluster.
        name: of the run.
        told: refusals that were reported before; new ones are added.

    Raises:
        UserError: there is no such run, or the API server does not answer.
    """
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(list_kinds, kubectl, kinds) for kinds in AROUND]
        run = kubectl.get(RUNS, name)
        own, workloads, events = (report_refusals(each.result(), told) for each in asked)
    return sort_objects(run, [*own, *workloads], events)


def observe_runs(kubectl: Kubectl, scope: Sequence[str]) -> list[RunObjects]:
    """Observe every run of a namespace, or of all.

    Raises:
        UserError: runs may not be listed, or the API server does not answer.
    """
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(list_kinds, kubectl, kinds, *scope) for kinds in AROUND[:2]]
        runs = kubectl.items(RUNS, *scope)
        around = [each for part in asked for each in report_refusals(part.result())]
    return [
        sort_objects(run, [each for each in around if _namespace(each) == _namespace(run)])
        for run in runs
    ]


def report_refusals(listed: ListedObjects, told: set[str] | None = None) -> list[Manifest]:
    """Say which kinds are left out, each once, and return the objects of the others."""
    known = set() if told is None else told
    for problem in listed.refused:
        if problem.what not in known:
            known.add(problem.what)
            say(f"{problem.what}: what follows leaves them out")
    return listed.items


def _namespace(manifest: Manifest) -> str:
    return str(manifest["metadata"]["namespace"])


def list_kinds(kubectl: Kubectl, kinds: str, *scope: str) -> ListedObjects:
    """List objects of kinds, without those that may not be listed.

    Raises:
        UserError: the API server does not answer.
    """
    try:
        return ListedObjects(kubectl.items(kinds, *scope))
    except UserError as error:
        if error.problem.reason != "Forbidden":
            raise
        if "," not in kinds:
            return ListedObjects([], (error.problem,))
        parts = [list_kinds(kubectl, kind, *scope) for kind in kinds.split(",")]
        items = [item for part in parts for item in part.items]
        return ListedObjects(items, tuple(each for part in parts for each in part.refused))


HOUR_S = 3_600.0
ASKED_FOR = {"Manual", "Imported"}
"""Reasons of checkpoints that a user created: their time is not that of their step."""


def steps_per_hour(checkpoints: Iterable[Manifest]) -> float | None:
    """Steps per hour between the newest two checkpoints of different steps that the run scheduled.

    Those are made when they are written, which tells how long it took.
    """
    saved = sorted(
        {
            (int(each["spec"].get("step", 0)), each["metadata"].get("creationTimestamp") or "")
            for each in checkpoints
            if each["spec"].get("reason") not in ASKED_FOR
        },
        reverse=True,
    )
    if not saved:
        return None
    step, when = saved[0]
    for earlier, then in saved[1:]:
        taken_s = (parse_time(when) - parse_time(then)).total_seconds()
        if earlier < step and taken_s > 0:
            return (step - earlier) / taken_s * HOUR_S
    return None
