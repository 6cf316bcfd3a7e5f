"""`etude promote`, `rollback`, `freeze`, `unfreeze`, `release`: the version that users get."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.examples import epilog
from etude.cli.output import Exit, console, print_row
from etude.cli.verbs.options import AsJson, RunFolder

app = typer.Typer(
    no_args_is_help=True, help="Propose a version, and show which one users are served."
)

At = Annotated[str, typer.Option(help="host:port of the feedback service's requests.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="ETUDE_KEY_FILE",
        help="File with an API key of scope admin; not needed with certificates.",
    ),
]
Reason = Annotated[str, typer.Option(help="One line for those who read the decision.")]
RequestId = Annotated[
    str, typer.Option(help="Name of the request: the same one is answered once. Drawn if empty.")
]
LOCAL = "127.0.0.1:7061"
_VERSION = "RUN_UID@EPOCH.NUMBER; EPOCH.NUMBER alone for one that is in use or tested."


@app.command(epilog=epilog("release propose"))
def propose(
    evaluation: Annotated[str, typer.Argument(help="Name of a finished EvalRun of `etude eval`.")],
    run: RunFolder,
    *,
    reason: Reason = "",
    at: At = LOCAL,
    key_file: KeyFile = None,
    request_id: Annotated[
        str, typer.Option(help="Name of the request; that of the EvalRun if empty.")
    ] = "",
) -> None:
    """Try an evaluated checkpoint with users, if the gate lets it pass.

    Exits with 1 if the decision is to refuse.
    """
    from etude.cli import runs
    from etude.cli.releases import client

    result = client.read_evaluation(runs.folder_of(run), evaluation)
    service = client.ReleaseClient(at, client.read_key(key_file))
    _print(asyncio.run(service.propose(result, reason, request_id)))


def promote(
    version: Annotated[
        str, typer.Argument(metavar="[VERSION]", help=f"{_VERSION} Unset: the candidate.")
    ] = "",
    *,
    without_gate: Annotated[
        bool, typer.Option("--without-gate", help="Allow a version that passed no gate.")
    ] = False,
    reason: Reason = "",
    at: At = LOCAL,
    key_file: KeyFile = None,
    request_id: RequestId = "",
) -> None:
    """Serve a version to everyone: the candidate under test, or another one.

    Exits with 1 if the decision is to refuse.
    """
    from etude.cli.releases import client

    service = client.ReleaseClient(at, client.read_key(key_file))
    _print(asyncio.run(service.promote(version, reason, request_id, without_gate=without_gate)))


def rollback(
    version: Annotated[
        str,
        typer.Argument(
            metavar="[VERSION]",
            help=f"Version to stop: {_VERSION} Unset: the candidate, else the version in use.",
        ),
    ] = "",
    *,
    reason: Reason = "",
    at: At = LOCAL,
    key_file: KeyFile = None,
    request_id: RequestId = "",
) -> None:
    """Stop to serve a version: everyone gets the one before. It waits for nothing.

    Name the version where the canary may end meanwhile. Exits with 1 if refused.
    """
    from etude.cli.releases import client

    service = client.ReleaseClient(at, client.read_key(key_file))
    _print(asyncio.run(service.roll_back(version, reason, request_id)))


def freeze(
    *,
    reason: Reason = "",
    at: At = LOCAL,
    key_file: KeyFile = None,
    request_id: RequestId = "",
) -> None:
    """Allow roll-backs alone, until `etude unfreeze`."""
    from etude.cli.releases import client

    service = client.ReleaseClient(at, client.read_key(key_file))
    _print(asyncio.run(service.freeze(reason, request_id)))


def unfreeze(
    *,
    reason: Reason = "",
    at: At = LOCAL,
    key_file: KeyFile = None,
    request_id: RequestId = "",
) -> None:
    """End a freeze of a person or of a monitor. Exits with 1 if refused."""
    from etude.cli.releases import client

    service = client.ReleaseClient(at, client.read_key(key_file))
    _print(asyncio.run(service.unfreeze(reason, request_id)))


@app.command(epilog=epilog("release status"))
def status(*, at: At = LOCAL, key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Show the version that users get, since when and why, and the candidate under test."""
    from etude.cli.releases import client

    found = asyncio.run(client.ReleaseClient(at, client.read_key(key_file)).read_status())
    if as_json:
        print_row(client.to_json(found))
        return
    for line in client.describe(found):
        console().print(line, soft_wrap=True)


def _print(decision: tuple[str, str]) -> None:
    action, sentence = decision
    console().print(sentence, soft_wrap=True)
    if action == "Refuse":
        raise SystemExit(Exit.NO)
