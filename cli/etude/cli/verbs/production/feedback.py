"""`etude feedback`: ask questions about the feedback of users, and erase users."""

import csv
import io
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from etude.cli.examples import epilog
from etude.cli.output import escape_controls, print_row, print_whole, say
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
from etude.common.errors import Problem, UserError

if TYPE_CHECKING:
    from etude.cli.feedback_tables import Answer

app = typer.Typer(
    no_args_is_help=True, help="Ask questions about the feedback of users; erase users."
)

User = Annotated[str, typer.Argument(help="Name of the user, as API keys and events have it.")]
Tenant = Annotated[str, typer.Option(help="Tenant of the user.")]
RunStores = Annotated[
    list[str],
    typer.Option(help="Storage of a run with checkpoints; repeatable. Unset: that of --store."),
]


@app.command(epilog=epilog("feedback sql"))
def sql(  # noqa: PLR0913 - a verb has as many parameters as it has options
    question: Annotated[str, typer.Argument(metavar="SELECT", help="One SELECT in DuckDB's SQL.")],
    *,
    store: Annotated[
        str,
        typer.Option(
            envvar="ETUDE_FEEDBACK_STORE",
            help="s3://bucket/prefix or file:///folder of the service.",
        ),
    ],
    endpoint: Endpoint = None,
    region: Region = None,
    since: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="First day to read, in UTC.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows to print at most.")] = 1_000,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer.")] = 60.0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, with a header.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask the tables of a feedback service a question; nothing can be changed.

    Tables: events, consents, outcomes (signals of each rollout), windows, window_rollouts. They
    hold figures under pseudonyms, and no text of users. Users who left disappear from them.
    """
    from etude.cli.feedback_tables import ask, open_tables
    from etude.common.api.storage import StoreAccess

    access = StoreAccess(endpoint=endpoint, region=region)
    first_day = since.date().isoformat() if since else ""
    with open_tables(store, access, since=first_day) as database:
        answer = ask(database, question, limit=limit, timeout_s=timeout)
    if as_json:
        _check_names(answer.columns)
        for row in answer.rows:
            print_row(dict(zip(answer.columns, map(_to_json, row), strict=True)))
    elif as_csv:
        sys.stdout.write(_to_csv(answer))
    else:
        print_whole(_to_table(answer))
    if answer.is_cut:
        say(f"only the first {limit} rows: --limit shows more")


@app.command("find-subject", epilog=epilog("feedback find-subject"))
def find_subject(  # noqa: PLR0913 - one for each option
    user: User,
    *,
    tenant: Tenant,
    store: LedgerStore,
    key_store: KeyStore,
    secret: Secret,
    ledger: Ledger = "feedback",
    run_store: RunStores = [],  # noqa: B006 - Typer copies it
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Show what is stored of a user, and which checkpoints may have seen it.

    Events, recorded turns, rollouts that wait or were trained, tasks, and the checkpoints of runs
    that had started to train a window with rollouts of the user. Nothing is changed.
    """
    access = write_ledger_options(store, key_store, secret, ledger, (endpoint, region))
    _report(tenant, user, [*access, *_join_runs(run_store)], as_json=as_json)


@app.command("delete-subject", epilog=epilog("feedback delete-subject"))
def delete_subject(  # noqa: PLR0913 - one for each option
    user: User,
    *,
    url: Annotated[str, typer.Option(help="HTTP address of the feedback service.")],
    key_file: Annotated[
        Path, typer.Option(envvar="ETUDE_KEY_FILE", help="File with an API key of scope admin.")
    ],
    tenant: Tenant,
    store: LedgerStore,
    key_store: KeyStore,
    secret: Secret,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates to trust.")] = None,
    ledger: Ledger = "feedback",
    run_store: RunStores = [],  # noqa: B006 - Typer copies it
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Erase a user: no event, no recorded turn can be read again, and no rollout is trained.

    Prints what that reached, and the checkpoints that may have seen the user before. Safe to
    repeat, also after it was killed. It cannot be taken back.
    """
    order = ["--url", url, "--key-file", str(key_file)]
    order += ["--ca-file", str(ca_file)] if ca_file else []
    access = write_ledger_options(store, key_store, secret, ledger, (endpoint, region))
    _report(tenant, user, [*order, *access, *_join_runs(run_store)], as_json=as_json)


def _join_runs(run_stores: Sequence[str]) -> list[str]:
    return [f"--run-store={uri}" for uri in run_stores]


def _report(tenant: str, user: str, words: Sequence[str], *, as_json: bool) -> None:
    # The feedback part is never imported here: it is another process, as in a cluster.
    module = "etude.feedback.commands.subject"
    named = (f"--tenant={tenant}", f"--user={user}", *(["--json"] if as_json else []))
    done = subprocess.run([sys.executable, "-m", module, *named, *words], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def _check_names(columns: Sequence[str]) -> None:
    """Check that each row has a member for each column: names in an object are unique."""
    repeated = [name for name, count in Counter(columns).items() if count > 1]
    if repeated:
        what = f"has several columns named {', '.join(repeated)}"
        fix = "name each column with AS, or ask for --csv"
        raise UserError(Problem("InvalidQuery", what, "the question", fix))


def _to_table(answer: "Answer") -> Table:
    table = Table(box=None, pad_edge=False)
    for column in answer.columns:
        table.add_column(column)
    for row in answer.rows:
        table.add_row(*("" if value is None else str(_to_json(value)) for value in row))
    return table


def _to_csv(answer: "Answer") -> str:
    text = io.StringIO()
    rows: Sequence[Sequence[Any]] = [answer.columns, *answer.rows]
    for row in rows:
        cells = ("" if value is None else str(_to_json(value)) for value in row)
        csv.writer(text).writerow([escape_controls(cell) for cell in cells])
    return text.getvalue()


def _to_json(value: object) -> object:
    """The value as JSON has it: times in ISO 8601, what JSON does not know as text."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case datetime() | date():
            return value.isoformat()
        case list() | tuple():
            return [_to_json(each) for each in value]
        case dict():
            return {str(key): _to_json(each) for key, each in value.items()}
        case _:
            return str(value)
