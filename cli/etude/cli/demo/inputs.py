"""Inputs of the demo: a generated model folder, tasks and demonstrations."""

import json
import subprocess
import sys
from pathlib import Path

from etude.cli.output import say
from etude.common.errors import Problem, UserError

PREFIX = Path("inputs") / "etude" / "demo"
"""Folder of s3://etude/demo/… inside a local run folder."""


def find_manifest() -> Path:
    """The demo's RLRun, from the repository or from the installed package.

    Raises:
        UserError: neither holds it.
    """
    in_wheel = Path(__file__).with_name("rlrun.yaml")
    in_repository = Path(__file__).parents[4] / "examples" / "demo" / "rlrun.yaml"
    for path in (in_wheel, in_repository):
        if path.is_file():
            return path
    raise UserError(
        Problem(
            "NotFound",
            what="the demo's manifest is not installed",
            where=str(in_repository),
            fix="run from a clone of the repository",
        )
    )


def prepare_inputs(folder: Path, seed: int) -> None:
    """Generate the inputs of one seed, unless they are complete already.

    Raises:
        UserError: the folder holds another seed's run, or the generator failed.
    """
    target = folder / PREFIX
    facts = target / "facts.json"
    if facts.is_file():
        found = json.loads(facts.read_text()).get("seed")
        if found == seed:
            return
        raise UserError(
            Problem(
                "Conflict",
                what=f"holds the demo of seed {found}, not {seed}",
                where=str(folder),
                fix=f"etude demo --seed {seed} --dir {folder}-{seed}",
            )
        )
    say(f"generating tasks, demonstrations and tokenizer into {target}")
    command = [sys.executable, "-m", "etude.demo.generate"]
    done = subprocess.run([*command, "--out", str(target), "--seed", str(seed)], check=False)
    if done.returncode or not facts.is_file():
        raise UserError(
            Problem(
                "Internal",
                what=f"the generator ended with {done.returncode}",
                where=str(target),
                fix="see its output above",
            )
        )
