"""`etude feedback`: ask questions about the feedback of users."""

import csv
import io
import math
import sys
from collections.abc import Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from etude.cli.examples import epilog
from etude.cli.output import escape_controls, print_row, print_whole, say
from etude.cli.verbs.options import AsJson, Endpoint, Region

if TYPE_CHECKING:
    from etude.cli.feedback_tables import Answer

app = typer.Typer(no_args_is_help=True, help="Ask questions about the feedback of users.")


@app.callback()
def group() -> None:
    """Keep `sql` a verb of its own, though it is the only one."""


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
        for row in answer.rows:
            print_row(dict(zip(answer.columns, map(_to_json, row), strict=True)))
    elif as_csv:
        sys.stdout.write(_to_csv(answer))
    else:
        print_whole(_to_table(answer))
    if answer.is_cut:
        say(f"only the first {limit} rows: --limit shows more")


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
