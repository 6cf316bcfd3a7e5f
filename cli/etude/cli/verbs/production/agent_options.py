"""Arguments and options of `etude agent`, and the folder of its state."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from etude.common.errors import InvalidFieldError, Problem, UserError

if TYPE_CHECKING:
    from etude.agent import toolsets
    from etude.agent.interactive.consent import AgentState


def find_toolset(name: str) -> "toolsets.Toolset":
    """Find a toolset of Etude, or of an installed package.

    Raises:
        UserError: there is none of this name.
    """
    from etude.agent.toolsets import toolset

    try:
        return toolset(name)
    except InvalidFieldError as error:
        fix = "give one of these, or a name like acme.Tools of an installed package"
        raise UserError(Problem("Usage", error.what, "--toolset", fix)) from error


def _check_key(key: str) -> str:
    """Check that a header can have the key.

    Raises:
        UserError: it cannot.
    """
    if not key.isascii() or not key.isprintable():
        fix = "export ETUDE_API_KEY=etude_…, on one line and without quotes around it"
        what = "holds characters that no API key has"
        raise UserError(Problem("InvalidArgument", what, "--key", fix))
    return key


Key = Annotated[
    str,
    typer.Option(
        "--key",
        envvar="ETUDE_API_KEY",
        callback=_check_key,
        help="API key; better in ETUDE_API_KEY.",
    ),
]
StateFolder = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="Folder of consent, waiting events, edits and patches.",
        show_default=False,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT",
        help="Work to do, several with --pool; without it, a conversation begins.",
    ),
]
Gateway = Annotated[str, typer.Option(envvar="ETUDE_GATEWAY", help="URL of the gateway.")]
Model = Annotated[str, typer.Option(help="Served model.")]
Toolset = Annotated[
    str,
    typer.Option("--toolset", help="`rollout.toolset` of the policy's training."),
]
ToolFormat = Annotated[
    Literal["Xml", "Native"], typer.Option(help="`rollout.toolFormat` of that training.")
]
Turns = Annotated[int, typer.Option(min=1, help="Turns for one instruction.")]
TurnTokens = Annotated[int, typer.Option(min=1, help="Tokens of one turn.")]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="Of sampling.")]
Yes = Annotated[bool, typer.Option("--yes", help="Make edits, or apply a patch, unasked.")]
Commands = Annotated[
    bool, typer.Option("--commands", help="Run commands in the folder without a question.")
]
Search = Annotated[
    str,
    typer.Option(
        help="URL of a code search service, or a file trained-….npz that the policy was trained"
        " with, for work in the folder itself."
    ),
]
Pool = Annotated[
    str, typer.Option(help="Work in a pool, on a copy: a local run, or host:port of a broker.")
]
PoolName = Annotated[str, typer.Option(help="Pool of the run, where it has several.")]
Template = Annotated[
    str, typer.Option(help="Template of the pool; needed where there are several.")
]
Wait = Annotated[
    int, typer.Option(min=1, max=3600, help="Seconds to wait for a free place in the pool.")
]


def open_state(folder: Path | None) -> "AgentState":
    """Open the state: in the given folder, or by the XDG rules."""
    from etude.agent.interactive.consent import AgentState

    root = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return AgentState(folder or Path(root) / "etude" / "agent")


def refuse(reason: str, what: str, fix: str) -> NoReturn:
    """Refuse what the user asked for.

    Raises:
        UserError: always.
    """
    raise UserError(Problem(reason, what, "etude agent", fix))
