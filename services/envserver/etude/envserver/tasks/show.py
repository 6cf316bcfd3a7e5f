"""Display of one task for its author: instruction, files, hidden tests, solution.

python -m etude.envserver.tasks.show TASK
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from etude.common.errors import UserError
from etude.common.harbor import task as harbor_task
from etude.common.harbor.task import HarborTask
from etude.envserver import exit_codes

MAX_LINES = 60
"""Lines shown of one file; the rest is counted."""


def render_task(task: HarborTask) -> str:
    """Render a task as text."""
    return "\n".join(_sections(task)) + "\n"


def _sections(task: HarborTask) -> Iterator[str]:
    yield f"task         {task.task_id}"
    command = task.command.replace(harbor_task.TEST_COMMAND, "bash /tests/test.sh")
    yield f"verifier     {command}, at most {task.verifier_timeout_s:g} s"
    yield f"may change   {' '.join(task.artefacts) or 'everything'}"
    if task.image:
        yield f"image        {task.image}"
    if task.unknown_keys:
        yield f"unknown keys {' '.join(task.unknown_keys)}"
    yield f"\ninstruction\n  {task.instruction}"
    for step in task.steps:
        yield f"\nstep {step.name}\n  {step.task.instruction}"
        yield from _files(f"step {step.name}, brought into the workspace", step.workdir())
    yield from _files("environment", harbor_task.read_files(task.environment))
    yield from _files("tests (hidden from the agent)", task.tests())
    yield from _files("solution (hidden from the agent)", task.solution())


def _files(title: str, files: Mapping[str, bytes]) -> Iterator[str]:
    for path, data in files.items():
        lines = data.decode(errors="replace").splitlines()
        yield f"\n{title}: {path}"
        yield from (f"  {_visible(line)}" for line in lines[:MAX_LINES])
        if len(lines) > MAX_LINES:
            yield f"  ({len(lines) - MAX_LINES} more lines)"


def _visible(line: str) -> str:
    """Control characters spelt out: a task's author may be hostile to a terminal."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line)


def main(arguments: Sequence[str]) -> int:
    """Print one task."""
    parser = argparse.ArgumentParser(prog="python -m etude.envserver.tasks.show")
    parser.add_argument("task", type=Path, help="a task folder")
    given = parser.parse_args(arguments)
    try:
        sys.stdout.write(render_task(harbor_task.read_task(exit_codes.require_folder(given.task))))
    except UserError as error:
        return exit_codes.report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
