"""`kubectl-etude`: entry point of the plugin, which kubectl calls for `kubectl etude`."""

import io
import sys
from collections.abc import Callable, Sequence

import typer

from etude.cli.kubectl.client import Kubectl
from etude.cli.kubectl.flags import split_flags
from etude.cli.kubectl.verbs import logs, release, show, suspend
from etude.cli.output import exit_with_problem

EXAMPLES = {
    "status": ("kubectl etude status demo", "kubectl etude status demo -n lab -o json"),
    "why": ("kubectl etude why demo -o json", "kubectl etude why policyroute/coder -n lab"),
    "watch": ("kubectl etude watch demo", "kubectl etude watch demo --plain"),
    "top": ("kubectl etude top", "kubectl etude top --all-namespaces --sort steps"),
    "logs": (
        "kubectl etude logs demo --role trainer --follow",
        "kubectl etude logs demo --role inference --previous",
    ),
    "stacks": ("kubectl etude stacks demo", "kubectl etude stacks demo --role inference"),
    "checkpoint": ("kubectl etude checkpoint demo", "kubectl etude checkpoint demo --now --wait"),
    "suspend": ("kubectl etude suspend demo", "kubectl etude suspend demo --wait"),
    "resume": ("kubectl etude resume demo", "kubectl etude resume demo --wait"),
    "propose": (
        "kubectl etude propose coder --evalrun coder-v42-1f0c22d9",
        "kubectl etude propose coder --evalrun held-out --reason 'after the freeze'",
    ),
    "promote": ("kubectl etude promote coder", "kubectl etude promote coder --version 1.42"),
    "rollback": (
        "kubectl etude rollback coder",
        'kubectl etude rollback coder --reason "too slow"',
    ),
    "freeze": ("kubectl etude freeze coder", 'kubectl etude freeze coder --reason "audit"'),
    "unfreeze": ("kubectl etude unfreeze coder", "kubectl etude unfreeze coder -n lab"),
}
FLAGS = (
    "kubectl's own flags work here too: --namespace, --context, --kubeconfig, --as,"
    " --request-timeout and the other flags of kubectl options."
)


def epilog(verb: str) -> str:
    """The examples of a verb and what else it takes, as the last paragraphs of its help."""
    lines = "\n\n".join(f"  {line}" for line in EXAMPLES[verb])
    return f"{FLAGS}\n\nExamples:\n\n{lines}"


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
    "logs": logs.logs,
    "stacks": logs.stacks,
    "suspend": suspend.suspend,
    "resume": suspend.resume,
    "propose": release.propose,
    "promote": release.promote,
    "rollback": release.rollback,
    "freeze": release.freeze,
    "unfreeze": release.unfreeze,
}
for name, verb in VERBS.items():
    app.command(name, epilog=epilog(name))(verb)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no box or dot
    with exit_with_problem():
        given = split_flags(sys.argv[1:] if arguments is None else arguments)
        kubectl = Kubectl(flags=given.flags)
        app(list(given.own), obj=kubectl, prog_name="kubectl etude")


if __name__ == "__main__":
    main()
