"""`etude replay`: train a recorded step again, and compare every figure with the journal."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from etude.cli import runs
from etude.cli.output import Exit, print_row, say
from etude.cli.resolved_run import resolve_run
from etude.cli.verbs.options import AsJson, RunFolder

DIFFERS = 9
"""Exit code of the program if a figure is not the recorded one."""


def replay(
    run: RunFolder,
    *,
    step: Annotated[int, typer.Option(min=1, help="Step to replay, counted over all phases.")],
    as_json: AsJson = False,
) -> None:
    """Train a step again from the checkpoint before it; say "same", or exactly what differs."""
    resolved = resolve_run(runs.folder_of(run)).run
    with tempfile.TemporaryDirectory(prefix="etude-replay-") as folder:
        file = Path(folder) / "run.json"
        file.write_text(json.dumps(resolved), encoding="utf-8")
        command = [sys.executable, "-m", "etude.trainer.commands.replay", str(file)]
        with (Path(folder) / "errors").open("w+b") as errors:
            process = subprocess.Popen(
                [*command, "--step", str(step)], stdout=subprocess.PIPE, stderr=errors, text=True
            )
            for line in process.stdout or ():
                _show(json.loads(line), as_json=as_json)
            code = process.wait()
            errors.seek(0)
            problem = errors.read().decode(errors="replace").strip()
    if code == DIFFERS:
        raise SystemExit(Exit.NO)
    if code:
        say(problem)
        raise SystemExit(Exit.INVALID if code == Exit.INVALID else Exit.BUG)


def _show(row: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_row(row)
    elif "skipped" in row:
        say(f"damaged checkpoint passed over: {row['skipped']}")
    elif "from" in row:
        start = f"the checkpoint of step {row['from']}" if row["from"] else "the start weights"
        say(f"{row['steps']} steps from {start}")
    else:
        batch = f", {row['rollouts']} rollouts" if row["rollouts"] else ""
        figures = f"loss {row['loss']:.6g}, gradient norm {row['gradNorm']:.6g}"
        verdict = "same" if row["same"] else "differs"
        place = f"{row['phase']} {row['step']}{batch}"
        say(f"step {row['globalStep']} ({place}): {verdict}; {figures}")
        for each in row["differences"]:
            say(f"  {each}")
