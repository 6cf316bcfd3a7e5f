"""Observed objects of a run: the run, its pools, checkpoints, pods, workloads and Events."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from etude.cli.kubectl.pods import labels, name
from etude.common.api.status import RLRunStatus
from etude.common.errors import Problem, UserError

Manifest = Mapping[str, Any]

RUN = "etude.dev/run"
POOL = "etude.dev/pool"
ROLE = "etude.dev/role"
ATTEMPT = "etude.dev/attempt"
TRAINER = "trainer"
KINDS = {"EnvPool": "pools", "Checkpoint": "checkpoints", "Pod": "pods", "StatefulSet": "sets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
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
        return name(self.run)

    @property
    def status(self) -> RLRunStatus:
        """The run's status.

        Raises:
            UserError: an operator of another version wrote a status that cannot be read here.
        """
        try:
            return RLRunStatus.understood(self.run.get("status") or {})
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
        own = [pod for pod in self.pods if labels(pod).get(label) == wanted]
        return own if pool is not None else [pod for pod in own if POOL not in labels(pod)]


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


def seen_of(run: Manifest, around: Sequence[Manifest], events: Sequence[Manifest] = ()) -> Seen:
    """Sort the objects of a namespace by their relation to a run."""
    mine = name(run)
    pools = pool_names(run)
    found: dict[str, list[Manifest]] = {field: [] for field in KINDS.values()}
    for each in around:
        if _belongs(each, mine, pools):
            found[KINDS[each["kind"]]].append(each)
    found["checkpoints"].sort(key=_saved, reverse=True)
    return Seen(
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
            return name(each) in pools
        case "Checkpoint":
            return bool((each["spec"].get("runRef") or {}).get("name") == run)
        case "Pod" | "StatefulSet":
            return labels(each).get(RUN) == run or labels(each).get(POOL) in pools
        case _:
            return False


def _saved(checkpoint: Manifest) -> tuple[int, str]:
    created = checkpoint["metadata"].get("creationTimestamp") or ""
    return held(checkpoint)["step"], created


def held(checkpoint: Manifest) -> Manifest:
    """Step, policy version and bytes of a checkpoint, from its status or its spec."""
    spec, status = checkpoint["spec"], checkpoint.get("status") or {}
    names = ("step", "policyVersion", "sizeBytes")
    return {name: int(status.get(name) or spec.get(name) or 0) for name in names}
