"""`etude agent patches`, `accept` and `reject`: changes of work in a pool, decided by the user."""

import asyncio
from typing import Annotated

import typer
from rich.table import Table

from etude.cli.output import console, print_row, say
from etude.cli.verbs.options import AsJson
from etude.cli.verbs.production.agent_options import Key, StateFolder, open_state

Name = Annotated[
    str, typer.Argument(metavar="PATCH", help="A patch, or the first letters of its name.")
]


def patches(*, as_json: AsJson = False, state: StateFolder = None) -> None:
    """List the patches that wait for your decision, oldest first."""
    from etude.agent.interactive.stored_patches import PatchStore

    store = PatchStore(open_state(state))
    waiting = store.list_patches()
    if as_json:
        for each in waiting:
            files = [change.path for change in each.files]
            row = {"name": each.name, "folder": each.folder, "files": files}
            print_row({**row, "instruction": each.instruction, "patch": str(store.text_file(each))})
        return
    table = Table(box=None, pad_edge=False)
    for title in ("patch", "folder", "files", "instruction"):
        table.add_column(title, overflow="fold")
    for each in waiting:
        names = " ".join(change.path for change in each.files)
        table.add_row(each.short_name, each.folder, names, each.instruction[:60])
    console().print(table)


def accept(name: Name, *, key: Key = "", state: StateFolder = None) -> None:
    """Change the folder as a patch says.

    Refused if a file of the patch was changed since the work began; the patch stays then.
    """
    from etude.agent.interactive.stored_patches import PatchStore
    from etude.cli.agent.conversation import flush_events

    home = open_state(state)
    store, client = PatchStore(home), home.open_client(key)
    patch = store.find(name)
    asyncio.run(store.accept(patch, client))
    say(f"changed {len(patch.files)} files of {patch.folder}")
    if client is not None:
        flush_events(client)


def reject(name: Name, *, key: Key = "", state: StateFolder = None) -> None:
    """Forget a patch; the folder stays as it is."""
    from etude.agent.interactive.stored_patches import PatchStore
    from etude.cli.agent.conversation import flush_events

    home = open_state(state)
    store, client = PatchStore(home), home.open_client(key)
    patch = store.find(name)
    store.reject(patch, client)
    say(f"forgot {patch.name}; {patch.folder} is as it was")
    if client is not None:
        flush_events(client)
