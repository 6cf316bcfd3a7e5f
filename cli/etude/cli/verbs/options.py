"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Endpoint = Annotated[
    str | None, typer.Option(help="S3 endpoint, for stores other than AWS: http://host:port.")
]
Region = Annotated[str | None, typer.Option(help="S3 region; us-east-1 unless given.")]
LedgerStore = Annotated[
    str, typer.Option("--store", envvar="ETUDE_FEEDBACK_STORE", help="Folder or bucket of a route.")
]
KeyStore = Annotated[
    str, typer.Option(envvar="ETUDE_FEEDBACK_KEY_STORE", help="Of the users' keys.")
]
Secret = Annotated[
    Path, typer.Option(envvar="ETUDE_FEEDBACK_SECRET_FILE", help="File of the ledger's secret.")
]
Ledger = Annotated[str, typer.Option(envvar="ETUDE_FEEDBACK_LEDGER", help="Name of the ledger.")]


def write_ledger_options(
    store: str, key_store: str, secret: Path, ledger: str, remote: tuple[str | None, str | None]
) -> tuple[str, ...]:
    """Options of the programs that read a ledger; remote is endpoint and region of the stores."""
    words = ("--store", store, "--key-store", key_store, "--secret", str(secret))
    given = zip(("--endpoint", "--region"), remote, strict=True)
    more = (word for name, value in given if value for word in (name, value))
    return (*words, "--ledger", ledger, *more)
