"""`kubectl etude logs` and `stacks`: output of a run's processes."""

from typing import Annotated

import typer

from etude.cli.output import say
from etude.common.errors import Problem, UserError

Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the RLRun.")]
ROLES = "trainer, inference, rewards, broker or node"


def logs(
    context: typer.Context,
    run: Run,
    *,
    role: Annotated[str, typer.Option(help=f"Only pods of this role: {ROLES}.")] = "",
    attempt: Annotated[int | None, typer.Option(help="Only pods of this attempt.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they write.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="What containers wrote before they restarted.")
    ] = False,
) -> None:
    """Print the logs of a run's pods and of its pools', each line after the name of its pod."""
    from etude.cli.kubectl import logs as reading

    if follow and previous:
        fix = "leave one of them out"
        raise UserError(Problem("Usage", "what is over does not go on", "-f and -p", fix))
    wanted = reading.PodFilter(role=role, attempt=attempt)
    if follow:
        reading.LogFollower(context.obj, run, wanted).follow()
        return
    found = reading.select_pods(reading.get_run_pods(context.obj, run), wanted)
    lines = reading.read_logs(context.obj, found, previous=previous)
    reading.print_lines(lines)
    if not lines:
        say(f"nothing was written yet; kubectl etude why {run} says what is waited for")


def stacks(
    context: typer.Context,
    run: Run,
    *,
    role: Annotated[str, typer.Option(help="trainer, inference, rewards or broker.")] = "trainer",
) -> None:
    """Print the stacks of every thread and asyncio task of a role; nothing is stopped."""
    from etude.cli.kubectl import logs as reading
    from etude.cli.kubectl.logs import read_stacks

    found = reading.select_pods(
        reading.get_run_pods(context.obj, run), reading.PodFilter(role=role)
    )
    for pod in found:
        try:
            reading.print_lines(read_stacks(context.obj, pod))
        except UserError as error:
            if len(found) == 1:
                raise
            say(error.problem.text())
