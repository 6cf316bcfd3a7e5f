"""`kubectl etude checkpoint --now`: a Checkpoint that asks a run for its state."""

import time
from collections.abc import Mapping
from typing import Any

from etude.cli.kubectl.client import CHECKPOINTS, RUNS, Kubectl
from etude.cli.output import say
from etude.common.api.meta import API_VERSION
from etude.common.errors import Problem, UserError

INTERVAL_S = 1.0
LIMIT_S = 3_600.0
"""The next step may take long; the order stands in any case."""


def request(run: Mapping[str, Any]) -> dict[str, Any]:
    """The object by which a user asks a run for a checkpoint."""
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


def save(kubectl: Kubectl, run: str, *, wait: bool) -> None:
    """Ask for a checkpoint, and tell how far it is.

    Raises:
        UserError: there is no such run, we may not, or nothing came of it.
    """
    made = kubectl.create(request(kubectl.get(RUNS, run)))
    name = made["metadata"]["name"]
    say(f"{name}: {run} writes it after its next step; it is kept until you delete it")
    if not wait:
        return
    deadline_s, told = time.monotonic() + LIMIT_S, ""
    while time.monotonic() < deadline_s:
        found, words = _look(kubectl, name)
        if words != told:
            told = words
            say(f"{name}: {words}")
        if found is not None and _is_ready(found, name):
            return
        time.sleep(INTERVAL_S)
    fix = f"the order stands: kubectl get checkpoint {name}"
    raise UserError(Problem("TimedOut", f"not yet after {LIMIT_S:.0f} s: {told}", name, fix))


def _look(kubectl: Kubectl, name: str) -> tuple[Mapping[str, Any] | None, str]:
    """The object and how far it is; a hiccup of the network ends no wait.

    Raises:
        UserError: it is gone, or we may not look at it.
    """
    try:
        found = kubectl.get(CHECKPOINTS, name)
    except UserError as error:
        if error.problem.reason != "Unreachable":
            raise
        return None, error.problem.what
    return found, _words(found)


def _words(found: Mapping[str, Any]) -> str:
    status = found.get("status") or {}
    said = next((c.get("message") for c in status.get("conditions") or ()), "")
    at = f" at step {status.get('step', 0)}" if status.get("uri") else ""
    return f"{status.get('phase') or 'Pending'}{at}" + (f": {said}" if said else "")


def _is_ready(found: Mapping[str, Any], name: str) -> bool:
    """Whether it is done.

    Raises:
        UserError: it will never be.
    """
    phase = (found.get("status") or {}).get("phase")
    if phase in {"Failed", "Corrupt"}:
        fix = f"delete it: kubectl delete checkpoint {name}"
        raise UserError(Problem("Conflict", _words(found), f"checkpoint {name}", fix))
    return phase == "Ready"
