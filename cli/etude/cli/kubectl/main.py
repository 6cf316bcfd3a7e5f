"""`kubectl-etude`: entry point of the plugin, which kubectl calls for `kubectl etude`."""

import io
import sys
from collections.abc import Callable, Sequence

import typer

from etude.cli.kubectl.client import Kubectl
from etude.cli.kubectl.examples import epilog
from etude.cli.kubectl.flags import split
from etude.cli.kubectl.verbs import orders, show, words
from etude.cli.output import explained

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look at the training runs of a cluster, and give orders to them.",
)
VERBS: dict[str, Callable[..., None]] = {
    "status": show.status,
    "why": show.why,
    "watch": show.watch,
    "top": show.top,
    "checkpoint": show.checkpoint,
    "logs": words.logs,
    "stacks": words.stacks,
    "suspend": orders.suspend,
    "resume": orders.resume,
}
for name, verb in VERBS.items():
    app.command(name, epilog=epilog(name))(verb)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no box or dot
    with explained():
        given = split(sys.argv[1:] if arguments is None else arguments)
        kubectl = Kubectl(flags=given.flags)
        app(list(given.own), obj=kubectl, prog_name="kubectl etude")


if __name__ == "__main__":
    main()
