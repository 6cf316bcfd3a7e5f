"""`etude report`: the pictures and the page of a run."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from etude.cli import runs
from etude.cli.output import say
from etude.cli.verbs.options import RunFolder
from etude.common.errors import Problem, UserError


def report(
    name: RunFolder,
    *,
    open_page: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
) -> None:
    """Draw the curves of a run and write report/index.html."""
    page = write_report(runs.folder_of(name))
    say(f"wrote {page}")
    if open_page:
        webbrowser.open(page.resolve().as_uri())


def write_report(folder: Path) -> Path:
    """Write report/index.html and its pictures; returns the page."""
    try:
        from etude.cli.report.charts import charts, png
        from etude.cli.report.page import render
    except ModuleNotFoundError as cause:
        fix = "install the package with its extra: pip install 'etude[cli]'"
        problem = Problem("MissingPackage", f"needs {cause.name}", "etude report", fix)
        raise UserError(problem) from cause
    from etude.common.run_folder.record import FolderRecord, latest_rows

    target = folder / "report"
    target.mkdir(exist_ok=True)
    record = FolderRecord(folder)
    rows = latest_rows(record.rows())
    pictures = charts(rows)
    for chart in pictures:
        (target / f"{chart.name}.png").write_bytes(png(chart))
    page = target / "index.html"
    page.write_text(render(folder.name, record, rows, pictures), encoding="utf-8")
    return page
