"""`etude experiment`: plan an A/B test of a checkpoint."""

import subprocess
import sys
from typing import Annotated

import typer

from etude.cli.examples import epilog
from etude.cli.verbs.options import AsJson

app = typer.Typer(no_args_is_help=True, help="Plan A/B tests of checkpoints.")


@app.callback()
def group() -> None:
    """Keep `simulate` a verb of its own, though it is the only one."""


@app.command(epilog=epilog("experiment simulate"))
def simulate(  # noqa: PLR0913 - a verb has as many parameters as it has options
    *,
    base: Annotated[float, typer.Option(help="Rate of the metric on stable, such as 0.6.")],
    effect: Annotated[float, typer.Option(help="Absolute difference to show, such as 0.0137.")],
    users: Annotated[int, typer.Option(help="Users of each arm.")],
    looks: Annotated[int, typer.Option(help="Looks at the data, evenly spaced.")] = 5,
    events: Annotated[float, typer.Option(help="Mean number of events of a user.")] = 1.0,
    correlation: Annotated[
        float, typer.Option(help="Between two events of a user, 0 to 1 (intra-class).")
    ] = 0.0,
    alpha: Annotated[float, typer.Option(help="False positives allowed, on both sides.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Everything follows from it.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the power of an A/B test before anyone starts it.

    2,000 experiments are simulated, with a candidate that has the effect and with one that has
    none: how often each rule of stopping sees the effect, and how often it sees one in the second.
    """
    # The feedback part is never imported here: it is another process, as in a cluster.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "etude.feedback.commands.simulate_experiment"),
            *(f"--base={base}", f"--effect={effect}", f"--users={users}", f"--looks={looks}"),
            *(f"--events={events}", f"--correlation={correlation}", f"--alpha={alpha}"),
            *(f"--seed={seed}", *(("--json",) if as_json else ())),
        ],
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.returncode)
