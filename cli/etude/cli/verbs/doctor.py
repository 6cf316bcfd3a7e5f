"""`etude doctor`: can this machine run it, and if not, what to do."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from etude.cli.output import Exit, console, print_row


def doctor(
    *,
    folder: Annotated[Path, typer.Option("--dir", help="Where runs would be kept.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per check.")] = False,
) -> None:
    """Check this machine: interpreter, memory, disk, sandboxes, store, packages."""
    from etude.cli.host_checks import CheckStatus, all_checks

    folder.mkdir(parents=True, exist_ok=True)
    findings = [check() for check in all_checks(folder)]
    if as_json:
        for f in findings:
            print_row({"name": f.name, "verdict": f.verdict, "detail": f.detail, "fix": f.fix})
    else:
        table = Table(box=None, pad_edge=False)
        colours = {CheckStatus.PASS: "green", CheckStatus.WARN: "yellow", CheckStatus.FAIL: "red"}
        for title in ("", "check", "found", "fix"):
            table.add_column(title)
        for f in findings:
            table.add_row(Text(f.verdict, colours[f.verdict]), f.name, f.detail, f.fix)
        console().print(table)
    if any(f.verdict == CheckStatus.FAIL for f in findings):
        raise SystemExit(Exit.NO)
