"""Runs that are over: nobody gives them orders."""

from collections.abc import Mapping
from typing import Any

from etude.cli.kubectl.client import RUNS, Kubectl, Manifest
from etude.cli.kubectl.pods import condition
from etude.common.errors import Problem, UserError

ENDS = ("Complete", "Failed")


def end_of(run: Mapping[str, Any]) -> str:
    """By which condition a run is over; empty as long as it is not."""
    return next((kind for kind in ENDS if condition(run, kind).get("status") == "True"), "")


def living(kubectl: Kubectl, run: str, order: str) -> Manifest:
    """A run that can still be given an order.

    Args:
        kubectl: whom to ask for it.
        run: its name.
        order: what is wanted of it, as in `nothing is left to suspend`.

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
