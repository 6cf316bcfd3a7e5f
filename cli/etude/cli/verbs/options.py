"""Arguments and options that several verbs share."""

from typing import Annotated

import typer

RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Endpoint = Annotated[
    str | None, typer.Option(help="S3 endpoint, for stores other than AWS: http://host:port.")
]
Region = Annotated[str | None, typer.Option(help="S3 region; us-east-1 unless given.")]
