"""`etude logs`: output of a run's processes."""

import re
import sys
import time
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from etude.cli import runs
from etude.cli.output import escape_controls
from etude.cli.verbs.options import RunFolder
from etude.common.errors import Problem, UserError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def logs(
    name: RunFolder,
    *,
    role: Annotated[str, typer.Option(help="Only pods whose name holds this.")] = "",
    attempt: Annotated[int | None, typer.Option(help="Only this attempt.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they write.")] = False,
) -> None:
    """Print the logs of a run, each line after the name of its process."""
    folder = runs.folder_of(name) / "logs"
    pattern = f"attempt-{attempt}" if attempt is not None else "attempt-*"
    found = sorted(path for path in folder.glob(f"{pattern}/*.log") if role in path.name)
    if not found:
        raise UserError(
            Problem(
                "NotFound",
                what=f"no logs{f' of {role}' if role else ''}",
                where=str(folder),
                fix="leave out --role and --attempt to see all",
            )
        )
    files = {path: path.open("rb") for path in found}
    for path, file in files.items():
        _copy(path, file)
    while follow:
        for path, file in files.items():
            _copy(path, file)
        time.sleep(0.3)


def _copy(path: Path, file: BinaryIO) -> None:
    for line in file:
        text = _COLOUR.sub("", line.decode(errors="replace").rstrip("\n"))
        sys.stdout.write(f"{path.parent.name}/{path.stem}  {escape_controls(text)}\n")
    sys.stdout.flush()
