"""Verifier of tasks: in a real sandbox the solution has to score 1 and doing nothing 0.

python -m etude.envserver.tasks.verify TASK_OR_FOLDER [--limit N] [--driver NAME] [--json]
"""

import asyncio
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from etude.common.errors import EtudeError, UserError
from etude.common.harbor import task as harbor_task
from etude.common.harbor.grading_repairs import repair_grading
from etude.common.harbor.step_rewards import combine_rewards
from etude.common.harbor.task import HarborTask
from etude.envserver import exit_codes
from etude.envserver.host.grading.grader import Grader
from etude.envserver.tasks import runner, step_proofs
from etude.envserver.tasks.runner import TaskPlace, TaskRunner
from etude.v1 import environments_pb2

_NETWORK = re.compile(
    rb"Could not resolve|Temporary failure in name resolution|Name or service not known"
    rb"|Network is unreachable|NameResolutionError|Failed to establish a new connection"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProof:
    """Result of verifying one task."""

    task_id: str
    nothing: float | None = None
    """The reward for doing nothing; None where there was none."""
    solution: float | None = None
    findings: tuple[str, ...] = ()
    """Faults; empty if the task is proved."""

    def row(self) -> str:
        """One line of the table."""
        state = "proved" if not self.findings else "NOT PROVED"
        rewards = f"{_format_reward(self.nothing)} {_format_reward(self.solution)}"
        return f"{self.task_id:40} {rewards}  {state}"


HEADING = f"{'task':40} {'nothing':>8} {'solution':>8}"


class _Attempt(NamedTuple):
    """One run of the verifier."""

    reward: float | None
    finding: str = ""


@dataclass(slots=True)
class TaskVerifier:
    """Verifies tasks with a host's own grader."""

    runner: TaskRunner
    grader: Grader

    async def verify_task(self, folder: Path) -> TaskProof:
        try:
            task = harbor_task.read_task(folder)
            return await self._verdict(task)
        except EtudeError as error:
            return TaskProof(task_id=folder.name, findings=(str(error),))

    async def _verdict(self, task: HarborTask) -> TaskProof:
        found = [f"key {key} is not known" for key in task.unknown_keys]
        place = await self.runner.prepare(task)
        nothing = await self._try(task, place, is_solved=False)
        found += _compare_reward("doing nothing", nothing, 0.0)
        solved = _Attempt(reward=None, finding="it has no solution/")
        if task.solution():
            solved = await self._try(task, place, is_solved=True)
            found += _compare_reward("its solution", solved, 1.0)
        else:
            found.append(solved.finding)
        return TaskProof(
            task_id=task.task_id,
            nothing=nothing.reward,
            solution=solved.reward,
            findings=tuple(found),
        )

    async def _try(self, task: HarborTask, place: TaskPlace, *, is_solved: bool) -> _Attempt:
        """Grade doing nothing, or the solution; of several steps each, up to one without reward."""
        if not task.steps:
            shown = step_proofs.show_solution(task) if is_solved else {}
            command = step_proofs.solve_command(task) if is_solved else ""
            return await self._attempt(task, place, task.tests() | shown, command + task.command)
        rewards, notes = list[float](), ""
        for proof in step_proofs.prove_steps(task, is_solved=is_solved):
            attempt = await self._attempt(proof.task, place, proof.files, proof.command)
            if attempt.reward is None:
                return attempt._replace(finding=f"step {proof.name}: {attempt.finding}")
            rewards.append(attempt.reward)
            notes += attempt.finding
        return _Attempt(reward=combine_rewards(task, rewards), finding=notes)

    async def _attempt(
        self, task: HarborTask, place: TaskPlace, files: Mapping[str, bytes], command: str
    ) -> _Attempt:
        repaired = repair_grading(task, files)
        job = environments_pb2.GradeJob(
            files=[
                environments_pb2.WorkspaceFile(path=path, content=content)
                for path, content in repaired.files.items()
            ],
            environment=repaired.environment,
            protected_paths=repaired.protected,
            allowed_paths=repaired.allowed,
            command=f"{task.setup_script}{command}",
            timeout_seconds=math.ceil(
                task.verifier_timeout_s + (task.setup_timeout_s if task.setup else 0)
            ),
            reward_path=harbor_task.REWARD_PATH,
        )
        answer = await self.grader.grade(place.source, job, template=place.template)
        if answer.timed_out:
            what = f"the verifier did not end within {task.verifier_timeout_s:g} s"
            return _Attempt(reward=None, finding=what + _network(answer.output))
        if not answer.HasField("reward_file"):
            tail = answer.output[-500:].decode(errors="replace")
            what = f"no reward file, exit code {answer.exit_code}: {tail!r}"
            return _Attempt(reward=None, finding=what + _network(answer.output))
        try:
            return _Attempt(
                reward=harbor_task.parse_reward(answer.reward_file), finding=_network(answer.output)
            )
        except ValueError as error:
            return _Attempt(reward=None, finding=str(error))


def _compare_reward(what: str, attempt: _Attempt, expected: float) -> list[str]:
    if attempt.reward is None:
        return [f"{what}: {attempt.finding}"]
    if attempt.reward == expected:
        return []
    return [f"{what} scores {attempt.reward:g}, not {expected:g}{attempt.finding}"]


def _network(output: bytes) -> str:
    """Hint for a verifier's output that shows a failed network access."""
    return "; it wants a network, which sandboxes do not have" if _NETWORK.search(output) else ""


def _format_reward(reward: float | None) -> str:
    return f"{'-' if reward is None else f'{reward:g}':>8}"


async def verify_tasks(
    folders: Sequence[Path],
    chosen: runner.RunnerChoice | None = None,
    say: Callable[[TaskProof], None] = lambda _: None,
) -> list[TaskProof]:
    """Verify the tasks in these folders, in order.

    Args:
        folders: of tasks.
        chosen: driver and image; the process driver unless given.
        say: called with each result, in order.

    Raises:
        UserError: this machine has no sandbox for it.
    """
    found = list[TaskProof]()
    async with runner.open_runner(chosen, folders) as bench:
        verifier = TaskVerifier(bench, bench.grader())
        slots = asyncio.Semaphore(2 * (os.cpu_count() or 1))

        async def one(folder: Path) -> TaskProof:
            async with slots:
                return await verifier.verify_task(folder)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(f), name=f"verify {f.name}") for f in folders]
            for task in tasks:
                found.append(await task)
                say(found[-1])
    return found


def _print_proof(verdict: TaskProof, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(asdict(verdict))}\n")
    else:
        sys.stdout.write(f"{verdict.row()}\n")
        for finding in verdict.findings:
            sys.stderr.write(f"{verdict.task_id}: {finding}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Verify, print the faults, and the number of proved tasks."""
    given = runner.make_parser("etude.envserver.tasks.verify").parse_args(arguments)
    try:
        folders = runner.chosen_folders(given.folder, given.limit)
        if not given.json:
            sys.stdout.write(f"{HEADING}\n")
        say = partial(_print_proof, as_json=given.json)
        found = asyncio.run(verify_tasks(folders, runner.parse_choice(given), say))
    except UserError as error:
        return exit_codes.report_error(error)
    proved = sum(not verdict.findings for verdict in found)
    if not given.json:
        sys.stdout.write(f"{proved} of {len(folders)} tasks: solution 1, doing nothing 0\n")
    return 0 if proved == len(folders) else exit_codes.NO


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
