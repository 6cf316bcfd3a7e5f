"""Requests about a route's releases: `kubectl etude propose`, `promote`, `rollback`, `freeze`."""

import json
import secrets
import time
from typing import Annotated, Any

import typer

from etude.cli.kubectl.client import ROUTES, Kubectl
from etude.cli.output import say
from etude.common.errors import Problem, UserError

Route = Annotated[str, typer.Argument(metavar="ROUTE", help="Name of the PolicyRoute.")]
Version = Annotated[
    str | None,
    typer.Option(help="EPOCH.NUMBER as `kubectl get policyroute` shows it; else what is tested."),
]
Reason = Annotated[str, typer.Option(help="One line for people.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds to wait for the answer.")]
LIMIT_S = 60.0
"""The operator forwards within seconds; a service that starts takes longer."""
INTERVAL_S = 1.0


def propose(
    context: typer.Context,
    route: Route,
    *,
    evalrun: Annotated[str, typer.Option(help="Finished EvalRun of the candidate.")],
    reason: Reason = "",
    timeout: Timeout = LIMIT_S,
) -> None:
    """Try an evaluated checkpoint with users, if the gate lets it pass."""
    _ask(context.obj, route, "Propose", {"evaluation": evalrun, "reason": reason}, timeout)


def promote(
    context: typer.Context,
    route: Route,
    *,
    version: Version = None,
    without_gate: Annotated[
        bool, typer.Option("--without-gate", help="Also a version that passed no gate.")
    ] = False,
    reason: Reason = "",
    timeout: Timeout = LIMIT_S,
) -> None:
    """Serve a version to everyone."""
    change = {"version": version, "without_gate": without_gate, "reason": reason}
    _ask(context.obj, route, "Promote", change, timeout)


def rollback(
    context: typer.Context,
    route: Route,
    *,
    version: Version = None,
    reason: Reason = "",
    timeout: Timeout = LIMIT_S,
) -> None:
    """Serve the version before to everyone who has this one."""
    change = {"version": version, "reason": reason}
    _ask(context.obj, route, "Rollback", change, timeout)


def freeze(
    context: typer.Context, route: Route, *, reason: Reason = "", timeout: Timeout = LIMIT_S
) -> None:
    """Allow roll-backs alone."""
    _ask(context.obj, route, "Freeze", {"reason": reason}, timeout)


def unfreeze(
    context: typer.Context, route: Route, *, reason: Reason = "", timeout: Timeout = LIMIT_S
) -> None:
    """End a freeze."""
    _ask(context.obj, route, "Unfreeze", {"reason": reason}, timeout)


def _ask(
    kubectl: Kubectl,
    route: str,
    action: str,
    change: dict[str, Any],
    limit_s: float,
) -> None:
    """Write the request and print the answer.

    Raises:
        UserError: the request is wrong, changes nothing, or has no answer in time.
    """
    # The models take a third of a second, which no help text should.
    from pydantic import ValidationError

    from etude.common.api.route import request as requests

    try:
        request = requests.RouteRequest(
            action=requests.RequestedAction(action), key=secrets.token_hex(8), **change
        )
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        what = f"{error.errors()[0]['msg'].lower()}"
        fix = (
            "give a version such as 1.42, the name of an EvalRun, and a reason of at most 256"
            " characters"
        )
        raise UserError(Problem("InvalidValue", what, f"--{field}", fix)) from error
    text = json.dumps(request.to_json(), sort_keys=True)
    kubectl.patch(ROUTES, route, {"metadata": {"annotations": {requests.ANNOTATION: text}}})
    answer = _await_answer(kubectl, route, requests.identify_request(text), limit_s)
    if answer["action"] == "Refuse":
        fix = "kubectl get policyroute -o wide shows what serves whom, and what is tested"
        raise UserError(Problem("Conflict", answer["sentence"], f"route {route}", fix))
    say(f"{route}: {answer['action']}: {answer['sentence']}")


def _await_answer(kubectl: Kubectl, route: str, request_id: str, limit_s: float) -> dict[str, str]:
    """Wait for the answer to a request.

    Raises:
        UserError: there is none in time.
    """
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        found = (kubectl.get(ROUTES, route).get("status") or {}).get("request") or {}
        if found.get("id") == request_id:
            return {key: str(found.get(key, "")) for key in ("action", "sentence")}
        time.sleep(INTERVAL_S)
    fix = f"the request stands: kubectl describe policyroute {route} tells whether feedback is up"
    what = f"has not answered after {limit_s:.0f} s"
    raise UserError(Problem("TimedOut", what, f"route {route}", fix))
