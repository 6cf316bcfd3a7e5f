"""`kubectl etude checkpoint --now`: an on-demand checkpoint."""

import time
from collections.abc import Mapping
from typing import Any

from etude.cli.kubectl.client import CHECKPOINTS, Kubectl
from etude.cli.kubectl.manifests import condition_of
from etude.cli.kubectl.verbs import suspend
from etude.cli.output import say
from etude.common.api.meta import API_VERSION
from etude.common.errors import Problem, UserError

INTERVAL_S = 1.0


def checkpoint_request(run: Mapping[str, Any]) -> dict[str, Any]:
    """The Checkpoint object that requests a checkpoint of a run."""
    metadata = run["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": "Checkpoint",
        "metadata": {"generateName": f"{metadata['name']}-manual-"},
        "spec": {
            "reason": "Manual",
            "runRef": {"name": metadata["name"], "uid": metadata["uid"]},
        },
    }


def save_checkpoint(kubectl: Kubectl, run: str, *, wait: bool, limit_s: float) -> Mapping[str, Any]:
    """Request a checkpoint, report its progress, and return the object.

    Raises:
        UserError: there is no such run, it cannot write one, or the request was refused.
    """
    before = suspend.get_active_run(kubectl, run, "save")
    if wait and _is_suspended(before):
        what = "it is suspended, and writes nothing until it is resumed"
        fix = f"kubectl etude resume {run} first; without --wait it is written after that"
        raise UserError(Problem("Conflict", what, f"run {run}", fix))
    made = kubectl.create(checkpoint_request(before))
    say(f"{made['metadata']['name']}: {_describe_time(before)}; it is kept until you delete it")
    return _wait_for_checkpoint(kubectl, run, made["metadata"]["name"], limit_s) if wait else made


def _is_suspended(run: Mapping[str, Any]) -> bool:
    """True if the run is suspended until a user resumes it."""
    return bool(run["spec"].get("suspend") or (run.get("status") or {}).get("hold"))


def _describe_time(run: Mapping[str, Any]) -> str:
    """Time of the checkpoint in words: a run without pods keeps the request until it has some."""
    name = run["metadata"]["name"]
    if _is_suspended(run):
        return f"{name} is suspended and writes it once it goes on: kubectl etude resume {name}"
    status = run.get("status") or {}
    if condition_of(run, "Ready").get("status") == "True" and not status.get("intent"):
        return f"{name} writes it after its next step"
    return f"{name} does not run now and writes it once it does: kubectl etude why {name}"


def _wait_for_checkpoint(
    kubectl: Kubectl, run: str, name: str, limit_s: float
) -> Mapping[str, Any]:
    """Wait for a checkpoint and print each change of its state.

    Raises:
        UserError: it failed, or is not there in time.
    """
    deadline_s, told, left_out = time.monotonic() + limit_s, "", set[str]()
    while time.monotonic() < deadline_s:
        found, words = _observe_checkpoint(kubectl, run, name, left_out)
        if words != told:
            told = words
            say(f"{name}: {words}")
        if found is not None and _is_ready(found, name):
            return found
        time.sleep(INTERVAL_S)
    fix = f"the order stands: kubectl get checkpoint {name}"
    raise UserError(Problem("TimedOut", f"not yet after {limit_s:.0f} s: {told}", name, fix))


def _observe_checkpoint(
    kubectl: Kubectl, run: str, name: str, left_out: set[str]
) -> tuple[Mapping[str, Any] | None, str]:
    """The object and its state in words; a network error does not end the wait.

    Raises:
        UserError: it was deleted, or access is denied.
    """
    try:
        found = kubectl.get(CHECKPOINTS, name)
    except UserError as error:
        if error.problem.reason != "Unreachable":
            raise
        return None, error.problem.what
    words = _describe(found)
    if condition_of(found, "Ready").get("reason") == "WaitingForRun":
        words = f"{words}; {suspend.observe_wait(kubectl, run, left_out).sentence}"
    return found, words


def _describe(found: Mapping[str, Any]) -> str:
    status = found.get("status") or {}
    said = condition_of(found, "Ready").get("message") or ""
    if not status:
        said = "the operator has not looked at it yet"
    at = f" at step {status.get('step', 0)}" if status.get("uri") else ""
    return f"{status.get('phase') or 'Pending'}{at}" + (f": {said}" if said else "")


def _is_ready(found: Mapping[str, Any], name: str) -> bool:
    """True once it is ready.

    Raises:
        UserError: it failed for good.
    """
    phase = (found.get("status") or {}).get("phase")
    if phase in {"Failed", "Corrupt"}:
        fix = f"delete it: kubectl delete checkpoint {name}"
        raise UserError(Problem("Conflict", _describe(found), f"checkpoint {name}", fix))
    return phase == "Ready"
