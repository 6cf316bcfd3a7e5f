"""`etude agent`: work with a served policy in a folder of one's own."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from etude.cli.examples import epilog
from etude.cli.output import say
from etude.cli.verbs.production.agent_replay import replay
from etude.common.errors import Problem, UserError

if TYPE_CHECKING:
    from etude.agent.interactive.consent import AgentState
    from etude.agent.interactive.gateway_policy import GatewayPolicy

app = typer.Typer(
    no_args_is_help=True,
    help="Work with a served policy in a folder of your own.",
    epilog=epilog("agent"),
)
app.command("replay", epilog=epilog("agent replay"))(replay)


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
        "--state", help="Folder of consent, waiting events and edits.", show_default=False
    ),
]


@app.command(epilog=epilog("agent work"))
def work(  # noqa: PLR0913 - a verb has as many parameters as it has options
    folder: Annotated[Path, typer.Argument(help="Folder to work in.")],
    prompt: Annotated[
        str, typer.Argument(help="Work to do; without it, a conversation begins.")
    ] = "",
    *,
    gateway: Annotated[str, typer.Option(envvar="ETUDE_GATEWAY", help="URL of the gateway.")],
    model: Annotated[str, typer.Option(help="Served model.")],
    key: Key = "",
    tools: Annotated[
        Literal["Standard", "Compact"],
        typer.Option("--toolset", help="`rollout.toolset` of the policy's training."),
    ] = "Standard",
    tool_format: Annotated[
        Literal["Xml", "Native"], typer.Option(help="`rollout.toolFormat` of that training.")
    ] = "Xml",
    turns: Annotated[int, typer.Option(min=1, help="Turns for one instruction.")] = 100,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one turn.")] = 8192,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Of sampling.")] = 1.0,
    yes: Annotated[bool, typer.Option("--yes", help="Make edits without a question.")] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="Run commands without a question.")
    ] = False,
    state: StateFolder = None,
) -> None:
    """Work in a folder: edits are shown as diffs, and asked for, as commands are.

    Conversations end with the end of input (Ctrl-D) or /done; /abandon ends a task as given up.
    Ctrl-C stops the work on an instruction. Prompt, tools and results are those of training.
    """
    is_terminal = sys.stdin.isatty()
    _check_work(folder, key, can_talk=bool(prompt) or is_terminal)
    from etude.agent.interactive.gateway_policy import GatewayAddress, GatewayPolicy
    from etude.agent.interactive.session import AgentSession, ConversationEvents
    from etude.agent.toolsets import toolset
    from etude.cli.agent.conversation import TerminalConversation, check_gateway
    from etude.cli.agent.screen import TerminalInput, TextScreen

    home = _open_state(state)
    client = home.open_client(key)
    if home.read_consent() is None:
        say("no feedback is sent; to help the policy learn from you: etude agent consent --help")
    address = GatewayAddress(url=check_gateway(gateway), model=model, key=key)
    policy = GatewayPolicy(address, toolset(tools), tool_format, turn_tokens, temperature)
    terminal = TerminalInput(sys.stdin.fileno())
    screen = TextScreen(yes, commands, terminal.ask if is_terminal else None)
    events = ConversationEvents(client, home, folder.resolve(), policy)
    _tell_session(home, policy)
    session = AgentSession.open(events, screen, screen, max_turns=turns)
    conversation = TerminalConversation(session, home, terminal)
    if prompt:
        conversation.work_once(prompt)
    else:
        conversation.converse()


def _tell_session(home: "AgentState", policy: "GatewayPolicy") -> None:
    """Say by which name the gateway records the conversation, if its user consents."""
    from etude.common.turn_log import identify_rollout

    stored = home.read_consent()
    if stored is not None and stored.granted:
        say(f"session {identify_rollout(stored.tenant, stored.user, policy.rollout)}")


def _check_work(folder: Path, key: str, *, can_talk: bool) -> None:
    """Check what work needs, before anything large is imported.

    Raises:
        UserError: something is missing.
    """
    if not can_talk:
        fix = "give the work: etude agent work FOLDER … 'Fix the date'"
        _refuse("Usage", "there is no terminal to talk on", fix)
    if not folder.is_dir():
        _refuse("NotFound", f"{folder} is no folder", "name the folder to work in")
    if not key:
        _refuse("Forbidden", "there is no API key", "export ETUDE_API_KEY=etude_…")


@app.command(epilog=epilog("agent consent"))
def consent(  # noqa: PLR0913 - a verb has as many parameters as it has options
    *,
    feedback: Annotated[str, typer.Option(help="URL of the feedback service.")] = "",
    tenant: Annotated[str, typer.Option(help="Tenant of the API key.")] = "",
    user: Annotated[str, typer.Option(help="User of the API key.")] = "",
    terms: Annotated[str, typer.Option(help="Version of the tenant's terms.")] = "",
    revoke: Annotated[bool, typer.Option("--revoke", help="Take the consent back.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Agree without a question.")] = False,
    key: Key = "",
    state: StateFolder = None,
) -> None:
    """Show, give or take back the consent to feedback.

    Without options it shows the decision and what would be sent.
    """
    from etude.agent.interactive.consent import SHARED, StoredConsent, make_client

    home = _open_state(state)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    if revoke:
        number = home.revoke(key, at=now)
        say(f"taken back; {number} waiting events were forgotten, and the service was told")
        return
    if not any((feedback, tenant, user, terms)):
        _show_consent(home)
        return
    options = {"--feedback": feedback, "--tenant": tenant, "--user": user, "--terms": terms}
    missing = [name for name, value in options.items() if not value]
    if missing:
        _refuse("Usage", f"{', '.join(missing)} missing", "name service, tenant, user and terms")
    decision = StoredConsent(
        service=feedback, tenant=tenant, user=user, terms=terms, granted=True, decided=now
    )
    make_client(home, decision, key)
    say(SHARED)
    if not yes:
        _ask_consent(f"Agree to the terms {terms} of {tenant}? [y/N] ")
    home.store_consent(decision)
    say(f"stored; events go to {feedback}")


@app.command(epilog=epilog("agent observe"))
def observe(*, key: Key = "", state: StateFolder = None) -> None:
    """Look again at the files of earlier edits, and send the events that wait.

    Each instruction to the agent does so first; a timer that runs this verb sees edits at
    5 minutes, an hour, a day and a week.
    """
    from etude.agent.interactive.edits import observe_edits
    from etude.cli.agent.conversation import flush_events

    home = _open_state(state)
    client = home.open_client(key)
    if client is None:
        _refuse("Forbidden", "there is no consent to feedback", "etude agent consent --help")
    number = observe_edits(home.journal, client, home.read_secret())
    say(f"looked at {number} edits")
    if not flush_events(client):
        raise typer.Exit(1)


def _open_state(folder: Path | None) -> "AgentState":
    """Open the state: in the given folder, or by the XDG rules."""
    from etude.agent.interactive.consent import AgentState

    root = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return AgentState(folder or Path(root) / "etude" / "agent")


def _ask_consent(question: str) -> None:
    """Ask for the consent.

    Raises:
        UserError: there is no terminal.
        Exit: the user does not agree.
    """
    from etude.cli.agent.screen import TerminalInput

    if not sys.stdin.isatty():
        _refuse("Usage", "there is no terminal to ask on", "agree with --yes")
    if TerminalInput(sys.stdin.fileno()).read_line(question).strip().lower() != "y":
        say("nothing was stored")
        raise typer.Exit(1)


def _show_consent(home: "AgentState") -> None:
    from etude.agent.interactive.consent import SHARED

    stored = home.read_consent()
    if stored is None:
        say("no decision: no feedback is sent")
    else:
        word = "given" if stored.granted else "taken back"
        say(
            f"{word} at {stored.decided}: terms {stored.terms} of {stored.tenant}, {stored.service}"
        )
    say(SHARED)


def _refuse(reason: str, what: str, fix: str) -> NoReturn:
    """Refuse what the user asked for.

    Raises:
        UserError: always.
    """
    raise UserError(Problem(reason, what, "etude agent", fix))
