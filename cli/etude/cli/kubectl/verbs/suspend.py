"""`kubectl etude suspend` and `resume`: commands to a run, and the wait for their effect."""

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from etude.cli.kubectl.client import RUNS, Kubectl
from etude.cli.kubectl.manifests import Manifest, terminal_condition
from etude.cli.output import Exit, say
from etude.common.errors import Problem, UserError

if TYPE_CHECKING:
    from etude.cli.kubectl.diagnose.run_objects import RunObjects

Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the RLRun.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return once it is so.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds to wait with --wait.")]
LIMIT_S = 900.0
"""A checkpoint may take ten minutes by default; pods need some more."""
INTERVAL_S = 1.0
RESUME = "etude.dev/resume"
"""Annotation by which a user overrules a hold of the operator; its value is the hold's time."""


def suspend(
    context: typer.Context, run: Run, *, wait: Wait = False, timeout: Timeout = LIMIT_S
) -> None:
    """Save a checkpoint, then release the pods; the run and its data stay."""
    _set_suspend(context.obj, get_active_run(context.obj, run, "suspend"), is_wanted=True)
    if wait:
        _wait_for(context.obj, run, _is_suspended, timeout)
        say(f"{run} is suspended; kubectl etude resume {run}")


def resume(
    context: typer.Context,
    run: Run,
    *,
    gpu_hours: Annotated[
        str | None, typer.Option("--gpu-hours", help="New spec.budget.gpuHours, if it is spent.")
    ] = None,
    sandbox_hours: Annotated[
        str | None,
        typer.Option("--sandbox-hours", help="New spec.budget.sandboxHours, if it is spent."),
    ] = None,
    wait: Wait = False,
    timeout: Timeout = LIMIT_S,
) -> None:
    """Let a suspended run go on at the step after its newest checkpoint.

    A run that a rule of its failurePolicy suspended goes on too: the order is written into an
    annotation of the run. A spent budget has to be raised. Of a phase that monitors froze,
    monitors[].afterStep is raised to the present step.
    """
    before = get_active_run(context.obj, run, "resume")
    budget = {"gpuHours": gpu_hours, "sandboxHours": sandbox_hours}
    change = resume_patch(before, {k: v for k, v in budget.items() if v})
    if change is None:
        _set_suspend(context.obj, before, is_wanted=False)
    else:
        context.obj.patch(RUNS, run, change)
        rests = before["spec"].get("suspend") or (before.get("status") or {}).get("hold")
        then = "pods come, then it goes on" if rests else "it was not suspended, and goes on"
        say(f"{run}: {json.dumps(change, separators=(',', ':'))}: {then}")
    if wait:
        _wait_for(context.obj, run, _is_progressing, timeout)
        say(f"{run} progresses; kubectl etude watch {run}")


def get_active_run(kubectl: Kubectl, run: str, order: str) -> Manifest:
    """Get a run that still takes commands.

    Args:
        kubectl: client of the cluster.
        run: its name.
        order: the command, as in `nothing is left to suspend`.

    Raises:
        UserError: there is no such run, or it is over.
    """
    found = kubectl.get(RUNS, run)
    end = terminal_condition(found)
    if end:
        what = f"the run is over: {end}; nothing is left to {order}"
        fix = f"kubectl etude why {run} says how it ended"
        raise UserError(Problem("Conflict", what, f"run {run}", fix))
    return found


def resume_patch(
    run: Mapping[str, Any], budget: Mapping[str, str]
) -> dict[str, dict[str, Any]] | None:
    """The patch that resumes a run; None if only spec.suspend holds it.

    Args:
        run: as the API server has it.
        budget: its new limits.

    Raises:
        UserError: its budget is spent and not raised.
    """
    hold = (run.get("status") or {}).get("hold")
    if run["spec"].get("suspend"):
        # A user's suspension replaces a hold of the operator.
        return {"spec": {"budget": dict(budget), "suspend": False}} if budget else None
    if hold is None:
        return {"spec": {"budget": dict(budget)}} if budget else None
    if hold["reason"] != "BudgetExceeded":
        # This very hold and no later one: its time is its name.
        order: dict[str, dict[str, Any]] = {"metadata": {"annotations": {RESUME: hold["since"]}}}
        spec: dict[str, Any] = {"budget": dict(budget)} if budget else {}
        phases = _release_phases(run)
        if hold["reason"] == "MonitorFroze" and phases != run["spec"]["phases"]:
            spec["phases"] = phases  # a patch replaces lists whole
        return {**order, "spec": spec} if spec else order
    if not budget:
        name = run["metadata"]["name"]
        what = f"the operator keeps it suspended: {hold['reason']}: {hold.get('message', '')}"
        fix = f"kubectl etude resume {name} --gpu-hours HOURS (or --sandbox-hours) raises it"
        raise UserError(Problem("Conflict", what, f"run {name}", fix))
    return {"spec": {"budget": dict(budget)}}


def _release_phases(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The phases of a run, with rules of monitors that let the present steps pass."""
    steps = {each["name"]: each.get("step", 0) for each in run["status"].get("phases", ())}

    def release(phase: Mapping[str, Any]) -> dict[str, Any]:
        step = steps.get(phase["name"], 0)
        rules = [
            {**rule, "afterStep": step}
            if rule.get("action") == "Freeze" and rule.get("afterStep", 0) < step
            else rule
            for rule in phase.get("monitors", ())
        ]
        return {**phase, "monitors": rules} if rules else dict(phase)

    return [release(phase) for phase in run["spec"].get("phases", ())]


def _set_suspend(kubectl: Kubectl, before: Manifest, *, is_wanted: bool) -> None:
    """Write the order into the spec unless it stands there already."""
    run = before["metadata"]["name"]
    if bool(before["spec"].get("suspend", False)) == is_wanted:
        say(f"{run}: spec.suspend is {str(is_wanted).lower()} already")
        return
    kubectl.patch(RUNS, run, {"spec": {"suspend": is_wanted}})
    order = "a checkpoint first, then the pods go" if is_wanted else "pods come, then it goes on"
    say(f"{run}: spec.suspend is {str(is_wanted).lower()}: {order}")


def _wait_for(
    kubectl: Kubectl, run: str, holds: Callable[["RunObjects"], bool], limit_s: float
) -> None:
    """Wait for a state of the run, and report progress.

    Raises:
        UserError: it takes too long, or the run was deleted.
        SystemExit: the run ended instead.
    """
    deadline_s = time.monotonic() + limit_s
    told, left_out = "", set[str]()
    while True:
        now = observe_wait(kubectl, run, left_out)
        if now.code is None and now.seen is not None and holds(now.seen):
            return
        if now.sentence != told:
            told = now.sentence
            say(told)
        if now.code is not None:
            raise SystemExit(now.code)
        if time.monotonic() > deadline_s:
            raise UserError(_timeout_problem(run, limit_s, now))
        time.sleep(INTERVAL_S)


class WaitStatus(NamedTuple):
    """State of a run that a command waits for."""

    sentence: str
    do: str = ""
    seen: "RunObjects | None" = None
    """None while the API server does not answer."""
    code: Exit | None = None
    """Exit code once the run is over."""


def observe_wait(kubectl: Kubectl, run: str, left_out: set[str]) -> WaitStatus:
    """Look at a run; a network error does not end the wait.

    Args:
        kubectl: client of the cluster.
        run: its name.
        left_out: refusals that were reported before.

    Raises:
        UserError: there is no such run, or access is denied.
    """
    from etude.cli.kubectl.diagnose.diagnosis import RunState
    from etude.cli.kubectl.diagnose.run_objects import observe_run
    from etude.cli.kubectl.diagnose.why import diagnose, utc_now

    try:
        seen = observe_run(kubectl, run, left_out)
    except UserError as error:
        if error.problem.reason != "Unreachable":
            raise
        return WaitStatus(error.problem.what)
    found = diagnose(seen, utc_now())
    codes = {RunState.OVER: Exit.DONE, RunState.FAILED: Exit.NO}
    return WaitStatus(found.sentence, found.do, seen, codes.get(found.state))


def _timeout_problem(run: str, limit_s: float, look: WaitStatus) -> Problem:
    what = f"not yet after {limit_s:.0f} s: {look.sentence}"
    fix = look.do or f"the order stands: kubectl etude watch {run}"
    return Problem("TimedOut", what, f"run {run}", fix)


def _is_suspended(seen: "RunObjects") -> bool:
    return _has_condition(seen, "Suspended")


def _is_progressing(seen: "RunObjects") -> bool:
    return _has_condition(seen, "Ready") and _has_condition(seen, "Progressing")


def _has_condition(seen: "RunObjects", kind: str) -> bool:
    """True if a condition holds for the present spec."""
    status = seen.status
    is_new = status.observed_generation >= seen.run["metadata"].get("generation", 0)
    return is_new and any(c.type == kind and c.status == "True" for c in status.conditions)
