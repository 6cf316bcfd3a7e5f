"""Sets of session tasks from one seed.

    python -m etude.demo.sessions.generate --out DIR --seed N

Written: tasks/train/ID/, tasks/held-out/ID/, facts.json.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.common.errors import UserError
from etude.common.evaluation.quality import count_changed_lines
from etude.demo.generate import write_new_folder
from etude.demo.sessions import task_folders
from etude.demo.sessions.tasks import SessionSource, SessionTask
from etude.envserver import exit_codes

MAX_TASKS = 5_000
"""Of about 15,000 different ones: drawing the last of them would take forever."""


def generate(out: Path, *, seed: int, train: int, held_out: int) -> Mapping[str, object]:
    """Make both sets in a folder that does not exist yet; a pure function of seed and sizes.

    Returns:
        The content of facts.json.

    Raises:
        option_error: a size is out of range.
        UserError: the folder exists and holds something.
        OSError: no folder can be made there.
    """
    if train < 0 or held_out < 1 or train + held_out > MAX_TASKS:
        what = f"are {train} and {held_out}"
        fix = f"ask for at least one task to measure on, and at most {MAX_TASKS} in all"
        raise exit_codes.option_error("--train, --held-out", what, fix)

    def fill(folder: Path) -> Mapping[str, object]:
        source = SessionSource(seed)
        # Measured tasks first: no other split can take one of theirs.
        splits = {
            "held-out": list(source.take("held-out", held_out)),
            "train": list(source.take("train", train)),
        }
        for split, tasks in splits.items():
            for index, task in enumerate(tasks):
                task_folders.write(task, folder / "tasks" / split / f"session-{index:04d}")
        facts = {"seed": seed, "train": train, **suite_facts(splits["held-out"])}
        (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
        return facts

    return write_new_folder(out, fill)


def suite_facts(tasks: Sequence[SessionTask]) -> dict[str, object]:
    """Figures of a set of tasks by which it is compared with others."""
    changed = [
        sum(count_changed_lines(change.before, change.after) for change in task.changes)
        for task in tasks
    ]
    return {
        "held_out": len(tasks),
        "families": dict(sorted(Counter(task.family.name for task in tasks).items())),
        "request_chars_median": statistics.median(len(task.request) for task in tasks),
        "request_chars_max": max(len(task.request) for task in tasks),
        "changed_lines_median": statistics.median(changed),
        "changed_lines_min": min(changed),
        "changed_files_median": statistics.median(len(task.reference) for task in tasks),
    }


def main(arguments: Sequence[str]) -> int:
    """Generate, and print what was generated."""
    parser = argparse.ArgumentParser(prog="python -m etude.demo.sessions.generate")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="everything follows from it")
    parser.add_argument("--train", type=int, default=0, help="tasks to train on")
    parser.add_argument("--held-out", type=int, default=64, help="tasks to measure on")
    given = parser.parse_args(arguments)
    try:
        facts = generate(given.out, seed=given.seed, train=given.train, held_out=given.held_out)
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)
    sys.stdout.write(
        f"{facts['held_out']} held-out tasks, {facts['train']} training tasks: requests of"
        f" {facts['request_chars_median']:.0f} characters, {facts['changed_lines_median']:.0f}"
        f" changed lines in {facts['changed_files_median']:.0f} files\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
