"""`etude agent replay`: a recorded conversation, once more in a training environment."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from etude.cli.output import Exit, console, print_row, say
from etude.cli.verbs.options import (
    AsJson,
    Endpoint,
    KeyStore,
    Ledger,
    LedgerStore,
    Region,
    Secret,
    write_ledger_options,
)
from etude.cli.verbs.production.agent_options import Template, find_toolset

if TYPE_CHECKING:
    from etude.agent import toolsets
    from etude.agent.recorded_conversation import RecordedTurn, ReplayReport
    from etude.cli.environments.client import EnvironmentRequest

_LEASE_S = 600
_MAX_ARGUMENT_CHARS = 200


Session = Annotated[str, typer.Argument(help="Session, as `etude agent work` names it.")]
Pool = Annotated[
    str, typer.Argument(metavar="POOL", help="A local run, or host:port of a pool's broker.")
]
Folder = Annotated[str, typer.Option(help="Files that the session began with: a folder, or a URI.")]
Model = Annotated[Path, typer.Option(help="Model folder, by which tokens are read.")]
Tenant = Annotated[str, typer.Option(help="Tenant of the session.")]
Terms = Annotated[list[str], typer.Option(help="Version of the terms that allows it; repeatable.")]
Toolset = Annotated[str, typer.Option(help="Of the agent in the session.")]
ToolFormat = Annotated[Literal["Xml", "Native"], typer.Option(help="Of the agent in the session.")]
PoolName = Annotated[str, typer.Option("--pool", help="Pool of the run, where it has several.")]


def replay(  # noqa: PLR0913 - a verb has as many parameters as it has options
    session: Session,
    pool: Pool,
    *,
    folder: Folder,
    model: Model,
    tenant: Tenant,
    terms: Terms,
    store: LedgerStore,
    key_store: KeyStore,
    secret: Secret,
    ledger: Ledger = "feedback",
    toolset: Toolset = "Standard",
    tool_format: ToolFormat = "Xml",
    template: Template = "",
    pool_name: PoolName = "",
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Replay a recorded session in a leased environment, and compare the results of its calls.

    Each call whose result is another one is shown with a diff; the exit code is 1 if there is one.
    """
    from etude.cli.environments import client
    from etude.cli.environments.leased_tools import copy_workspace

    access = write_ledger_options(store, key_store, secret, ledger, (endpoint, region))
    allowed = [word for each in terms for word in ("--terms", each)]
    turns = _read_turns("--tenant", tenant, "--session", session, *allowed, *access)
    found = client.find_pool(pool, pool_name)
    with copy_workspace(folder) as uri:
        wish = client.EnvironmentRequest(
            template=template or found.choose_template(pool),
            ttl_s=_LEASE_S,
            wait_s=60,
            uri=uri,
            toolset=toolset,
        )
        work = _replay(model, find_toolset(toolset), tool_format, turns, (found.broker, wish))
        report = asyncio.run(work)
    _show(report, as_json=as_json)
    if report.differences:
        raise typer.Exit(Exit.NO)


def _read_turns(*words: str) -> "list[RecordedTurn]":
    """Read the turns of a session, by the program that may open them.

    Raises:
        SystemExit: it refuses; it has said why.
    """
    from etude.agent.recorded_conversation import RecordedTurn

    command = (sys.executable, "-m", "etude.feedback.commands.sessions", "turns", *words)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return [RecordedTurn(**json.loads(line)) for line in done.stdout.splitlines()]


async def _replay(
    model: Path,
    tools: "toolsets.Toolset",
    tool_format: str,
    turns: "Sequence[RecordedTurn]",
    place: "tuple[str, EnvironmentRequest]",
) -> "ReplayReport":
    """Replay turns in an environment of a broker; place is its address and the request to it."""
    from etude.agent.chat import ChatFormat
    from etude.agent.chat.native_form import find_native_form
    from etude.agent.interactive.session import did_not_run
    from etude.agent.recorded_conversation import replay_conversation
    from etude.cli.environments.leased_tools import lease_environment

    chat = ChatFormat.load(model)
    if tool_format == "Native":
        tools = tools.with_form(find_native_form(chat, tools.schemas()))
    async with lease_environment(*place) as environment:
        return await replay_conversation(chat, tools, environment, turns, is_left_out=did_not_run)


def _show(report: "ReplayReport", *, as_json: bool) -> None:
    """Print the differences, and say how much was compared."""
    for each in report.differences:
        if as_json:
            print_row(each._asdict())
            continue
        call = f", call {each.call}" if each.call >= 0 else ""
        what = f"{each.tool or 'results'} {each.arguments_json}"[:_MAX_ARGUMENT_CHARS]
        console().print(Text(f"turn {each.turn}{call}: {what}", style="bold"))
        for line in each.format_diff():
            console().print(Text(line), soft_wrap=True)
    say(
        f"{report.num_turns} turns, {report.num_calls} calls,"
        f" {len(report.differences)} differences;"
        f" {report.num_left_out} calls were rejected or stopped and not run,"
        f" {report.num_unanswered} have no recorded result"
    )
