"""Commands that prove a task: its solution, and of several steps one after the other.

A step is proved in one fresh sandbox with all steps before it: what each brings enters, its
solution does the work, and the tests of the last one say what that is worth.
"""

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from etude.common.harbor.task import STEPS, WORKDIR, HarborTask, TaskStep
from etude.common.harbor.task_file import WORKSPACE

SOLUTION = "solution"
"""Folder below /tests where the solution is shown, for this proof only."""


class StepProof(NamedTuple):
    """Files and command that grade one step."""

    name: str
    task: HarborTask
    """The step as a task of one piece."""
    files: dict[str, bytes]
    """Files below /tests."""
    command: str


def show_solution(task: HarborTask) -> dict[str, bytes]:
    """Files of the solution, as they are shown to the verifier of this proof."""
    return {f"{SOLUTION}/{path}": data for path, data in task.solution().items()}


def solve_command(task: HarborTask, folder: str = "") -> str:
    """The beginning of a shell command that runs the solution below a folder of /tests first."""
    place = f"/tests/{folder}{SOLUTION}/solve.sh"
    return f"({task.solution_env}bash {shlex.quote(place)}) || exit; "


def prove_steps(task: HarborTask, *, is_solved: bool) -> Iterator[StepProof]:
    """The proof of each step, in order.

    Args:
        task: with steps.
        is_solved: True if the solutions of the steps do their work; else nothing does.
    """
    shown, begin = dict[str, bytes](), ""
    for step in task.steps:
        folder = f"{STEPS}/{step.name}/"
        shown |= {f"{folder}{WORKDIR}/{path}": data for path, data in step.workdir().items()}
        begin += _enter(step, folder)
        if is_solved and (solution := show_solution(step.task)):
            shown |= {f"{folder}{path}": data for path, data in solution.items()}
            begin += solve_command(task, folder)
        command = f"{begin}{step.task.command}"
        yield StepProof(step.name, step.task, step.task.tests() | shown, command)


def _enter(step: TaskStep, folder: str) -> str:
    """The beginning of a shell command that brings a step's files into the workspace."""
    files = step.workdir()
    if not files:
        return ""
    place = shlex.quote(f"/tests/{folder}{WORKDIR}")
    setup = " && bash ./setup.sh" if "setup.sh" in files else ""
    return f"(cd {WORKSPACE} && cp -R {place}/. .{setup}) || exit; "
