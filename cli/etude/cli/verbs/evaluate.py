"""`etude eval`: an EvalRun on this machine, in a local run's folder, as a cluster would run it."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from etude.cli import runs
from etude.cli.output import Exit, print_row, say
from etude.cli.verbs.options import AsJson, RunFolder

Status = Mapping[str, Any]


def evaluate(
    file: Annotated[Path, typer.Argument(help="Manifest of one EvalRun, and of its EnvPools.")],
    run: RunFolder,
    *,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint of a run, or an endpoint, here; the same command resumes it."""
    folder = runs.folder_of(run)
    name = runs.name_of(file, kind="EvalRun")
    runtime = runs.start_runtime(file, folder)

    def stop(_number: int, _frame: FrameType | None) -> None:
        runtime.process.terminate()

    with runs.handle_stop_signals(stop):
        code = runtime.process.wait()
    status = _status_of(folder, name)
    if not status.get("suites"):
        say(runtime.read_log_end())
        raise SystemExit(runs.exit_code(code) or Exit.NO)
    if as_json:
        print_row(status)
    else:
        _say_suites(status)
    if code:
        say(runtime.read_log_end())
        raise SystemExit(runs.exit_code(code))
    if status.get("verdict") not in {None, "", "Passed"}:
        raise SystemExit(Exit.NO)


def _status_of(folder: Path, name: str) -> Status:
    """Status of an evaluation; empty if the runtime refused it."""
    path = folder / "objects.json"
    objects = json.loads(path.read_bytes()) if path.is_file() else []
    for each in objects:
        if each["kind"] == "EvalRun" and each["metadata"]["name"] == name:
            status: Status = each.get("status", {})
            return status
    return {}


def _say_suites(status: Status) -> None:
    for suite in status["suites"]:
        best = suite.get("bestOf")
        figures = [f"mean {suite.get('mean', '-')}"]
        figures += [f"best of {suite['bestOfSamples']} {best}"] if best else []
        figures.append(f"{suite['samples']} rollouts of {suite['tasks']} tasks")
        figures += [f"{suite['lost']} lost"] if suite["lost"] else []
        say(f"{suite['name']}: {', '.join(figures)}")
        if suite.get("sentence"):
            say(f"  {suite['sentence']}")
    if status.get("policy"):
        say(f"version {status['policy']}, manifest {status['manifestDigest'][:12]}")
    say(f"results: {status['results']['uri']}")
