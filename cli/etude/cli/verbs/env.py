"""`etude env`: sandboxes by hand."""

import asyncio
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from etude.cli import runs
from etude.cli.examples import epilog
from etude.cli.output import console, print_row, say
from etude.cli.verbs.options import AsJson
from etude.common.errors import Problem, UserError

if TYPE_CHECKING:
    from etude.cli.environments.lease_store import EnvironmentLease

app = typer.Typer(no_args_is_help=True, help="Make, enter and end environments by hand.")

EMPTY = "empty:"
_SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash -i || exec sh -i")

Name = Annotated[
    str, typer.Argument(metavar="ENV", help="An environment, or the first letters of its name.")
]
Run = Annotated[str, typer.Option(help="A local run whose rollouts' environments count too.")]


@app.command(epilog=epilog("env create"))
def create(
    pool: Annotated[
        str,
        typer.Argument(metavar="POOL", help="A local run, or host:port of a pool's broker."),
    ],
    *,
    template: Annotated[
        str, typer.Option(help="Template of the pool; needed where there are several.")
    ] = "",
    workspace: Annotated[
        str, typer.Option(help="Folder with the first files, or its URI; none unless given.")
    ] = EMPTY,
    ttl: Annotated[
        int, typer.Option(min=10, max=86_400, help="Seconds that it lives while it is not used.")
    ] = 3600,
    wait: Annotated[
        int, typer.Option(min=1, max=3600, help="Seconds to wait for a free place.")
    ] = 60,
    pool_name: Annotated[
        str, typer.Option("--pool", help="Pool of the run, where it has several.")
    ] = "",
) -> None:
    """Make an environment and print its name."""
    from etude.cli.environments import client

    found = client.find_pool(pool, pool_name)
    wish = client.EnvironmentRequest(
        template=template or found.choose_template(pool),
        ttl_s=ttl,
        wait_s=wait,
        uri=_workspace_uri(workspace),
    )
    _store_leases(asyncio.run(client.launch_environments(found.broker, wish)))


@app.command(epilog=epilog("env ls"))
def ls(*, run: Run = "", as_json: AsJson = False) -> None:
    """List your environments; with --run also those that its rollouts use."""
    environments = _list_environments(run)
    if as_json:
        for each in environments:
            print_row(_row(each))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("environment", "template", "driver", "node", "ends in"):
        table.add_column(title, overflow="fold")
    for each in environments:
        row = _row(each)
        table.add_row(
            *(str(row[key]) for key in ("name", "template", "driver", "node")),
            _format_time_left(each),
        )
    console().print(table)


@app.command(
    "exec",
    epilog=epilog("env exec"),
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def exec_(
    name: Name,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What to run.")],
    *,
    run: Run = "",
    cwd: Annotated[str, typer.Option(help="Folder to start in, below the workspace.")] = "",
    timeout: Annotated[int, typer.Option(min=1, max=86_400, help="Seconds it may take.")] = 3600,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may be repeated.")] = None,
) -> None:
    """Run a command in an environment; its exit code becomes ours.

    What is piped in goes to the command; what is typed does not.
    """
    environment = _find_environment(name, run)
    words = command[1:] if command[0] == "--" else command
    options = {"cwd": cwd, "timeout_seconds": timeout, "env": _parse_pairs(env or ())}
    is_piped = not sys.stdin.isatty()
    raise SystemExit(asyncio.run(_run(environment, words, options, has_input=is_piped)))


@app.command(epilog=epilog("env shell"))
def shell(
    name: Name,
    *,
    run: Run = "",
    cwd: Annotated[str, typer.Option(help="Folder to start in, below the workspace.")] = "",
) -> None:
    """Open a shell in an environment, on a terminal where there is one; exit leaves it."""
    from etude.cli.environments import terminal

    environment = _find_environment(name, run)
    options: dict[str, object] = {"cwd": cwd, "timeout_seconds": 86_400}
    if terminal.is_terminal():
        options |= {"terminal": True, "env": {"TERM": os.environ.get("TERM", "xterm")}}
    raise SystemExit(asyncio.run(_run(environment, _SHELL, options, has_input=True)))


@app.command(epilog=epilog("env snapshot"))
def snapshot(
    name: Name,
    snapshot_id: Annotated[
        str, typer.Argument(metavar="SNAPSHOT", help="Its name: small letters, digits, dashes.")
    ],
    *,
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="Keep it in the pool's store too, and print what restore takes."
        ),
    ] = False,
) -> None:
    """Save an environment, which goes on; rollback puts it back."""
    from etude.cli.environments import client

    environment = _find_own(name)
    size = asyncio.run(client.save_snapshot(environment, snapshot_id))
    say(f"saved {environment.name} as {snapshot_id}, {size} bytes")
    if share:
        console().print(
            asyncio.run(client.share_snapshot(environment, snapshot_id)), soft_wrap=True
        )


@app.command(epilog=epilog("env rollback"))
def rollback(
    name: Name,
    snapshot_id: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="One of its own.")],
) -> None:
    """Put an environment back to a snapshot; programs in it end."""
    from etude.cli.environments import client

    environment = _find_own(name)
    asyncio.run(client.roll_back(environment, snapshot_id))
    say(f"{environment.name} is as it was at {snapshot_id}")


@app.command(epilog=epilog("env restore"))
def restore(
    name: Name,
    shared: Annotated[str, typer.Argument(metavar="SHARED", help="What snapshot --share printed.")],
) -> None:
    """Make an environment what was shared of another, which may be gone with its node.

    Both need the same template and first files.
    """
    from etude.cli.environments import client

    environment = _find_own(name)
    asyncio.run(client.restore_shared(environment, shared))
    say(f"{environment.name} is what was shared")


@app.command(epilog=epilog("env fork"))
def fork(
    name: Name,
    *,
    count: Annotated[int, typer.Option(min=1, max=64, help="How many.")] = 1,
    wait: Annotated[
        int, typer.Option(min=1, max=3600, help="Seconds to wait for free places.")
    ] = 60,
) -> None:
    """Make environments that begin as this one is now, and print their names."""
    from etude.cli.environments import client

    environment = _find_own(name)
    snapshot_name = f"fork-{uuid.uuid4().hex[:12]}"
    wish = client.EnvironmentRequest(
        template=environment.template,
        ttl_s=environment.ttl_s,
        wait_s=wait,
        snapshot_id=client.make_snapshot_id(environment, snapshot_name),
        number=count,
    )

    async def work() -> "list[EnvironmentLease]":
        await client.save_snapshot(environment, snapshot_name)
        return await client.launch_environments(environment.broker, wish)

    _store_leases(asyncio.run(work()))


@app.command(epilog=epilog("env rm"))
def rm(
    names: Annotated[list[str], typer.Argument(metavar="ENV...", help="Environments to end.")],
) -> None:
    """End environments of yours, with all their files."""
    from etude.cli.environments import client, lease_store

    for name in names:
        environment = lease_store.find_environment(name, lease_store.stored_leases())
        asyncio.run(client.release_leases(environment.broker, [environment.name]))
        lease_store.remove_lease(environment.name)
        say(f"ended {environment.name}")


async def _run(
    environment: "EnvironmentLease",
    words: Sequence[str],
    options: dict[str, object],
    *,
    has_input: bool,
) -> int:
    import grpc

    from etude.cli.environments import client, terminal

    fields = dict(options)
    if fields.pop("terminal", False):
        fields["terminal"] = terminal.terminal_size()
    opening = terminal.open_message(environment, words, **fields)
    async with client.access_environment(environment) as access:
        try:
            ending = await terminal.attach(access, opening, has_input=has_input)
        except grpc.aio.AioRpcError as error:
            is_refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            if not is_refused or not opening.HasField("terminal"):
                raise
            say(f"line by line, as there is no terminal: {error.details()}")
            opening.ClearField("terminal")
            ending = await terminal.attach(access, opening, has_input=has_input)
    if ending.ended_for:
        say(f"ended by the limit on {ending.ended_for}")
    return ending.exit_code


def _list_environments(run: str) -> "list[EnvironmentLease]":
    from etude.cli.environments import lease_store

    return lease_store.stored_leases() + (
        lease_store.run_leases(runs.folder_of(run)) if run else []
    )


def _find_environment(name: str, run: str) -> "EnvironmentLease":
    from etude.cli.environments import lease_store

    environment = lease_store.find_environment(name, _list_environments(run))
    if not environment.broker:
        say("this environment is a rollout's: what you change counts in its result")
    return environment


def _find_own(name: str) -> "EnvironmentLease":
    from etude.cli.environments import lease_store

    return lease_store.find_environment(name, lease_store.stored_leases())


def _store_leases(environments: "Sequence[EnvironmentLease]") -> None:
    from etude.cli.environments import lease_store

    for environment in environments:
        lease_store.store_lease(environment)
        console().print(environment.name)


def _workspace_uri(workspace: str) -> str:
    if workspace == EMPTY or "://" in workspace:
        return workspace
    folder = Path(workspace)
    if not folder.is_dir():
        fix = "name a folder, or leave --workspace out to begin without files"
        raise UserError(Problem("NotFound", "is not a folder", workspace, fix))
    return folder.resolve().as_uri()


def _parse_pairs(settings: Sequence[str]) -> dict[str, str]:
    wrong = [setting for setting in settings if "=" not in setting or setting.startswith("=")]
    if wrong:
        raise UserError(Problem("Usage", f"{wrong[0]!r} sets nothing", "--env", "give NAME=VALUE"))
    return dict(setting.split("=", 1) for setting in settings)


def _row(environment: "EnvironmentLease") -> dict[str, object]:
    lease = environment.lease
    return {
        "name": environment.name,
        "template": environment.template,
        "driver": lease.driver,
        "node": lease.endpoint,
        "ends_in_s": round(environment.left_s),
        "is_yours": bool(environment.broker),
    }


def _format_time_left(environment: "EnvironmentLease") -> str:
    seconds = max(0, round(environment.left_s))
    return f"{seconds // 60} min {seconds % 60} s" if environment.broker else "with its rollout"
