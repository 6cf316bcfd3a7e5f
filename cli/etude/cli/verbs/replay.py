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
from etude.cli.verbs.options import AsJson, RunFolder
from etude.common.errors import Problem, UserError

DIFFERS = 9
"""Exit code of the program if a figure is not the recorded one."""


def replay(
    run: RunFolder,
    *,
    step: Annotated[int, typer.Option(min=1, help="Step to replay, counted over all phases.")],
    as_json: AsJson = False,
) -> None:
    """Train a step again from the checkpoint before it; say "same", or exactly what differs."""
    resolved = _resolved_run(runs.folder_of(run))
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


def _resolved_run(folder: Path) -> dict[str, Any]:
    """The run of a folder as its processes read it.

    Raises:
        UserError: the folder has no state of a run.
    """
    from etude.common.run_folder.state import read_state

    state = read_state(folder)
    if state is None or not state.run:
        fix = "give the folder of a run that was started here"
        raise UserError(Problem("NotFound", "has no state of a run", str(folder), fix))
    run: Any = state.run
    metadata, spec = run["metadata"], dict(run["spec"])
    model_uri = (run.get("status", {}).get("resolved") or {}).get("modelUri")
    if model_uri and spec["model"].get("checkpointRef"):
        model = {key: value for key, value in spec["model"].items() if key != "checkpointRef"}
        spec["model"] = model | {"uri": model_uri}
    return {
        "name": metadata["name"],
        "uid": metadata.get("uid", metadata["name"]),
        "generation": metadata.get("generation", 1),
        "spec": spec,
    }
