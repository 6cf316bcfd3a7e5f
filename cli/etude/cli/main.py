"""`etude`: entry point of the command line."""

import io
import sys
from collections.abc import Callable

import typer

from etude.cli.examples import epilog
from etude.cli.output import exit_with_problem
from etude.cli.verbs import (
    compare,
    demo,
    doctor,
    env,
    evaluate,
    images,
    lint,
    logs,
    model,
    plan,
    report,
    run,
    serve,
    storage,
    tasks,
    weights,
)
from etude.cli.verbs.production import agent, experiment, feedback, release
from etude.cli.verbs.records import audit, replay, rescore

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of coding agents, on a laptop or a cluster.",
)
VERBS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "run": run.run,
    "watch": run.watch,
    "stop": run.stop,
    "logs": logs.logs,
    "report": report.report,
    "audit": audit.audit,
    "replay": replay.replay,
    "rescore": rescore.rescore,
    "compare": compare.compare,
    "eval": evaluate.evaluate,
    "doctor": doctor.doctor,
    "lint": lint.lint,
    "plan": plan.plan,
    "serve": serve.serve,
    "promote": release.promote,
    "rollback": release.rollback,
    "freeze": release.freeze,
    "unfreeze": release.unfreeze,
}
for name, verb in VERBS.items():
    app.command(name, epilog=epilog(name))(verb)
app.add_typer(agent.app, name="agent")
app.add_typer(tasks.app, name="tasks")
app.add_typer(storage.app, name="storage")
app.add_typer(model.app, name="model")
app.add_typer(weights.app, name="weights")
app.add_typer(images.app, name="images")
app.add_typer(env.app, name="env")
app.add_typer(experiment.app, name="experiment")
app.add_typer(release.app, name="release")
app.add_typer(feedback.app, name="feedback")


def main() -> None:
    """Run one verb."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no box or dot
    with exit_with_problem():
        app()
