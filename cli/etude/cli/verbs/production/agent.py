"""`etude agent`: work with a served policy in a folder of one's own."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.examples import epilog
from etude.cli.output import say
from etude.cli.verbs.production.agent_options import (
    Commands,
    Gateway,
    Key,
    Model,
    Pool,
    PoolName,
    Prompts,
    Search,
    StateFolder,
    Temperature,
    Template,
    ToolFormat,
    Toolset,
    Turns,
    TurnTokens,
    Wait,
    Yes,
    find_toolset,
    open_state,
    refuse,
)
from etude.cli.verbs.production.agent_patches import accept, patches, reject
from etude.cli.verbs.production.agent_replay import replay

if TYPE_CHECKING:
    from etude.agent.interactive.consent import AgentState

app = typer.Typer(
    no_args_is_help=True,
    help="Work with a served policy in a folder of your own.",
    epilog=epilog("agent"),
)
for verb in (patches, accept, reject, replay):
    app.command(verb.__name__, epilog=epilog(f"agent {verb.__name__}"))(verb)


@app.command(epilog=epilog("agent work"))
def work(  # noqa: PLR0913 - a verb has as many parameters as it has options
    folder: Annotated[Path, typer.Argument(help="Folder to work in.")],
    prompts: Prompts = None,
    *,
    gateway: Gateway,
    model: Model,
    key: Key = "",
    tools: Toolset = "Standard",
    tool_format: ToolFormat = "Xml",
    turns: Turns = 100,
    turn_tokens: TurnTokens = 8192,
    temperature: Temperature = 1.0,
    yes: Yes = False,
    commands: Commands = False,
    search: Search = "",
    pool: Pool = "",
    pool_name: PoolName = "",
    template: Template = "",
    wait: Wait = 60,
    state: StateFolder = None,
) -> None:
    """Work in a folder: edits are shown as diffs, and asked for, as commands are.

    Conversations end with the end of input (Ctrl-D) or /done; /abandon ends a task as given up.
    Ctrl-C stops the work on an instruction. Prompt, tools and results are those of training.
    With --pool, an environment has a copy of the folder; see etude agent accept --help.
    """
    _check_work(folder, key, prompts or [], is_in_pool=bool(pool))
    from etude.agent.interactive.gateway_policy import GatewayAddress, GatewayPolicy
    from etude.cli.agent.conversation import UserWork, check_url, converse

    address = GatewayAddress(url=check_url(gateway, "--gateway"), model=model, key=key)
    settings = (find_toolset(tools), tool_format, turn_tokens, temperature)
    work = UserWork(
        home=open_state(state),
        key=key,
        folder=folder.resolve(),
        make_policy=lambda: GatewayPolicy(address, *settings),
        max_turns=turns,
        accepts_edits=yes,
    )
    if not pool:
        converse(work, "".join(prompts or ()), accepts_commands=commands, search=search)
        return
    from etude.cli.agent.pool_work import find_place, work_in_pool

    place = find_place(pool, pool_name, template, toolset=tools, wait_s=wait)
    raise typer.Exit(work_in_pool(work, place, prompts or ()))


def _check_work(folder: Path, key: str, prompts: Sequence[str], *, is_in_pool: bool) -> None:
    """Check what work needs, before anything large is imported.

    Raises:
        UserError: something is missing.
    """
    example = "give the work: etude agent work FOLDER … 'Fix the date'"
    if not prompts and (is_in_pool or not sys.stdin.isatty()):
        refuse("Usage", "there is no terminal to talk on, or it is in a pool", example)
    if len(prompts) > 1 and not is_in_pool:
        refuse("Usage", f"{len(prompts)} pieces of work at once need --pool", example)
    if not folder.is_dir():
        refuse("NotFound", f"{folder} is no folder", "name the folder to work in")
    if not key:
        refuse("Forbidden", "there is no API key", "export ETUDE_API_KEY=etude_…")


@app.command(epilog=epilog("agent consent"))
def consent(  # noqa: PLR0913 - a verb has as many parameters as it has options
    *,
    feedback: Annotated[str, typer.Option(help="URL of the feedback service.")] = "",
    tenant: Annotated[str, typer.Option(help="Tenant of the API key.")] = "",
    user: Annotated[str, typer.Option(help="User of the API key.")] = "",
    terms: Annotated[str, typer.Option(help="Version of the tenant's terms.")] = "",
    demonstrations: Annotated[
        bool, typer.Option("--demonstrations", help="Send, too, what you keep of edited files.")
    ] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take the consent back.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Agree without a question.")] = False,
    key: Key = "",
    state: StateFolder = None,
) -> None:
    """Show, give or take back the consent to feedback.

    Without options it shows the decision and what would be sent.
    """
    from etude.agent.interactive.consent import SHARED, StoredConsent, make_client

    home = open_state(state)
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
        refuse("Usage", f"{', '.join(missing)} missing", "name service, tenant, user and terms")
    decision = StoredConsent(
        service=feedback,
        tenant=tenant,
        user=user,
        terms=terms,
        granted=True,
        decided=now,
        demonstrations=demonstrations,
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
    from etude.cli.agent.conversation import flush_events

    home = open_state(state)
    client = home.open_client(key)
    if client is None:
        refuse("Forbidden", "there is no consent to feedback", "etude agent consent --help")
    number = home.observe(client)
    say(f"looked at {number} edits")
    if not flush_events(client):
        raise typer.Exit(1)


def _ask_consent(question: str) -> None:
    """Ask for the consent.

    Raises:
        UserError: there is no terminal.
        Exit: the user does not agree.
    """
    from etude.cli.agent.screen import TerminalInput

    if not sys.stdin.isatty():
        refuse("Usage", "there is no terminal to ask on", "agree with --yes")
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
        word += ", with demonstrations" if stored.granted and stored.demonstrations else ""
        say(
            f"{word} at {stored.decided}: terms {stored.terms} of {stored.tenant}, {stored.service}"
        )
    say(SHARED)
