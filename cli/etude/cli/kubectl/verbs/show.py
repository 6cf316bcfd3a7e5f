"""`kubectl etude status`, `why`, `watch`, `top`, `checkpoint`: views of runs."""

from enum import StrEnum
from typing import Annotated

import typer

from etude.cli.output import console, print_row, print_whole
from etude.common.errors import Problem, UserError

Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the RLRun.")]
Target = Annotated[
    str, typer.Argument(metavar="RUN|KIND/NAME", help="A run, policyroute/NAME or evalrun/NAME.")
]
KINDS = {
    "run": {"rlr", "rlrun", "rlruns"},
    "route": {"polr", "policyroute", "policyroutes"},
    "evaluation": {"evr", "evalrun", "evalruns"},
}
"""Kinds that are explained, by the words that kubectl takes for them."""
CLI_VERSION = "etude.dev/cli/v1"
SAVED_WITHIN_S = 3_600.0
"""The next step may take long; the order stands in any case."""


class Output(StrEnum):
    """Output format of a verb."""

    TABLE = "table"
    JSON = "json"


class Sort(StrEnum):
    """Sort key of `top`, the largest first."""

    GPUS = "gpus"
    PODS = "pods"
    LEASES = "leases"
    STEPS = "steps"
    NAME = "name"


Format = Annotated[Output, typer.Option("--output", "-o", help="For people, or for programs.")]


def status(context: typer.Context, run: Run, *, output: Format = Output.TABLE) -> None:
    """Show a run on one screen: progress, roles, environments, bad conditions, and the cause."""
    from etude.cli.kubectl.diagnose.run_objects import observe_run
    from etude.cli.kubectl.diagnose.why import diagnose, utc_now
    from etude.cli.kubectl.views.status import status_screen

    seen = observe_run(context.obj, run)
    explanation = diagnose(seen, utc_now())
    if output is Output.JSON:
        metadata = {key: seen.run["metadata"][key] for key in ("name", "namespace")}
        row = {"kind": "RunStatus", "metadata": metadata, "status": seen.run.get("status") or {}}
        print_row({"apiVersion": CLI_VERSION, **row, "why": explanation.as_json()})
    else:
        print_whole(status_screen(seen, explanation, utc_now()))


def why(context: typer.Context, target: Target, *, output: Format = Output.TABLE) -> None:
    """Say why a run, route or evaluation does not go on: the first cause, its evidence, and a fix.

    Raises:
        UserError: the kind is another one, or there is no such object.
    """
    from etude.cli.kubectl.client import EVALUATIONS, ROUTES
    from etude.cli.kubectl.diagnose.evaluations import diagnose_evaluation, observe_namespace
    from etude.cli.kubectl.diagnose.routes import diagnose_route
    from etude.cli.kubectl.diagnose.run_objects import observe_run
    from etude.cli.kubectl.diagnose.why import diagnose, utc_now

    kind, name = _split_target(target)
    if kind == "route":
        found = context.obj.get(ROUTES, name)
        explanation = diagnose_route(found, observe_namespace(context.obj))
    elif kind == "evaluation":
        found = context.obj.get(EVALUATIONS, name)
        explanation = diagnose_evaluation(found, observe_namespace(context.obj))
    else:
        explanation = diagnose(observe_run(context.obj, name), utc_now())
    if output is Output.JSON:
        print_row({"apiVersion": CLI_VERSION, "kind": "Explanation", **explanation.as_json()})
    else:
        console().print("\n".join(explanation.lines()), soft_wrap=True)


def _split_target(target: str) -> tuple[str, str]:
    """Kind and name of what is explained; a name alone is a run's.

    Raises:
        UserError: the kind is another one.
    """
    prefix, slash, name = target.rpartition("/")
    if not slash:
        return "run", name
    for kind, words in KINDS.items():
        if prefix.lower() in words:
            return kind, name
    fix = "give a run, policyroute/NAME or evalrun/NAME"
    raise UserError(Problem("Usage", f"{prefix} is no kind that is explained", target, fix))


def watch(
    context: typer.Context,
    run: Run,
    *,
    plain: Annotated[bool, typer.Option(help="Lines instead of a picture.")] = False,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between looks.")] = 2.0,
) -> None:
    """Watch a run until it ends; Ctrl-C ends the watching, not the run."""
    from etude.cli.kubectl.views.live import ClusterViewer
    from etude.cli.live_view import show_run

    viewer = ClusterViewer(context.obj, run, interval)
    viewer.view()  # a run that does not exist is an error, and no empty picture
    show_run(viewer, as_lines=plain, is_over=viewer.is_over)


def top(
    context: typer.Context,
    *,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Runs of all namespaces.")
    ] = False,
    sort: Annotated[Sort, typer.Option(help="What the largest of comes first.")] = Sort.GPUS,
    output: Format = Output.TABLE,
) -> None:
    """Show all runs side by side: GPUs, pods that are ready, leases, steps per hour."""
    from etude.cli.kubectl.diagnose.run_objects import observe_runs
    from etude.cli.kubectl.views.top import run_usage, sort_usages, usage_table

    found = observe_runs(context.obj, ["--all-namespaces"] if everywhere else [])
    lines = sort_usages(map(run_usage, found), sort)
    if output is Output.JSON:
        items = [line.as_json() for line in lines]
        print_row({"apiVersion": CLI_VERSION, "kind": "RunUsageList", "items": items})
    else:
        print_whole(usage_table(lines, with_namespace=everywhere))


def checkpoint(
    context: typer.Context,
    run: Run,
    *,
    now: Annotated[
        bool, typer.Option("--now", help="Have the run write one after its next step.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="With --now: return once it is so.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait with --wait.")
    ] = SAVED_WITHIN_S,
    output: Format = Output.TABLE,
) -> None:
    """List the checkpoints of a run, the newest first; a resume starts at the newest Ready one."""
    if now:
        from etude.cli.kubectl.verbs.checkpoint import save_checkpoint

        made = save_checkpoint(context.obj, run, wait=wait, limit_s=timeout)
        if output is Output.JSON:
            print_row(made)
        return
    if wait:
        fix = "add --now, or leave out --wait"
        raise UserError(Problem("Usage", "a list is not waited for", "--wait without --now", fix))
    from etude.cli.kubectl.diagnose.run_objects import observe_run
    from etude.cli.kubectl.views.top import checkpoints_table

    found = observe_run(context.obj, run).checkpoints
    if output is Output.JSON:
        print_row({"apiVersion": CLI_VERSION, "kind": "CheckpointList", "items": list(found)})
    else:
        print_whole(checkpoints_table(found))
