"""End of a run: complete or failed runs take no commands."""

from collections.abc import Mapping
from typing import Any

from etude.cli.kubectl.client import RUNS, Kubectl, Manifest
from etude.cli.kubectl.diagnose.pods import condition
from etude.common.errors import Problem, UserError

ENDS = ("Complete", "Failed")


def end_of(run: Mapping[str, Any]) -> str:
    """The condition by which a run is over; empty while it is not."""
    return next((kind for kind in ENDS if condition(run, kind).get("status") == "True"), "")


def living(kubectl: Kubectl, run: str, order: str) -> Manifest:
    """Get a run that still takes commands.

    Args:
        kubectl: client of the cluster.
        run: its name.
        order: the command, as in `nothing is left to suspend`.

    Raises:
        UserError: there is no such run, or it is over.
    """
    found = kubectl.get(RUNS, run)
    end = end_of(found)
    if end:
        what = f"the run is over: {end}; nothing is left to {order}"
        fix = f"kubectl etude why {run} says how it ended"
        raise UserError(Problem("Conflict", what, f"run {run}", fix))
    return found
