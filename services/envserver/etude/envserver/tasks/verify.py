"""Proof that tasks can be graded: in a real sandbox the solution scores 1 and doing nothing 0.

python -m etude.envserver.tasks.verify TASK_OR_FOLDER [--limit N]
"""

import argparse
import asyncio
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from etude.common import harbor
from etude.common.errors import EtudeError, UserError
from etude.common.harbor import HarborTask
from etude.envserver.drivers.process import ProcessDriver
from etude.envserver.node.cache import ResultCache
from etude.envserver.node.grading import Grader
from etude.envserver.node.sources import Sources
from etude.envserver.tasks import exits
from etude.v1 import environments_pb2

SOLUTION = "solution"
"""Folder below /tests where the solution is shown, for this proof only."""


class Finding(NamedTuple):
    """What is wrong with one task."""

    task_id: str
    what: str


@dataclass(slots=True)
class Proof:
    """Grades tasks with a node's own grader."""

    grader: Grader
    sources: Sources

    async def findings(self, folder: Path) -> list[Finding]:
        """What is wrong with the task in this folder; nothing if it is proved."""
        try:
            task = harbor.read_task(folder)
            found = [f"key {key} is not known" for key in task.unknown_keys]
            found += await self._against(task, 0.0, task.tests(), task.command, "doing nothing")
            solution = {f"{SOLUTION}/{path}": data for path, data in task.solution().items()}
            if not solution:
                return [Finding(task.task_id, what) for what in (*found, "it has no solution/")]
            command = f"bash /tests/{SOLUTION}/solve.sh && {task.command}"
            files = task.tests() | solution
            found += await self._against(task, 1.0, files, command, "its solution")
        except EtudeError as error:
            return [Finding(folder.name, str(error))]
        return [Finding(task.task_id, what) for what in found]

    async def _against(
        self,
        task: HarborTask,
        expected: float,
        files: Mapping[str, bytes],
        command: str,
        what: str,
    ) -> list[str]:
        source = await self.sources.get(task.environment.absolute().as_uri())
        job = environments_pb2.GradeJob(
            files=[environments_pb2.WorkspaceFile(path=p, content=c) for p, c in files.items()],
            command=command,
            timeout_seconds=math.ceil(task.verifier_timeout_s),
            reward_path=harbor.REWARD_PATH,
        )
        answer = await self.grader.grade(source.tree, job, template="verify")
        if answer.timed_out:
            return [f"{what}: the verifier did not end within {task.verifier_timeout_s:g} s"]
        if not answer.HasField("reward_file"):
            tail = answer.output[-500:].decode(errors="replace")
            return [f"{what}: no reward file, exit code {answer.exit_code}: {tail!r}"]
        try:
            reward = harbor.reward(answer.reward_file)
        except ValueError as error:
            return [f"{what}: {error}"]
        return [] if reward == expected else [f"{what} scores {reward:g}, not {expected:g}"]


async def verify(folders: Sequence[Path]) -> list[Finding]:
    """What is wrong with the tasks in these folders.

    Raises:
        UserError: this machine has no sandbox for it.
    """
    with tempfile.TemporaryDirectory(prefix="etude-verify-") as scratch:
        driver = ProcessDriver(Path(scratch))
        await driver.start()
        proof = Proof(Grader(driver, ResultCache()), Sources(Path(scratch) / "sources"))
        places = asyncio.Semaphore(2 * (os.cpu_count() or 1))

        async def one(folder: Path) -> list[Finding]:
            async with places:
                return await proof.findings(folder)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(f), name=f"verify {f.name}") for f in folders]
        finally:
            await driver.stop()
    return [finding for task in tasks for finding in task.result()]


def _chosen(folder: Path, limit: int) -> list[Path]:
    if limit < 0:
        raise exits.wrong_option("--limit", f"is {limit}", "use 0 for all, or more")
    is_task = (exits.existing(folder) / "task.toml").is_file()
    folders = [folder] if is_task else harbor.task_folders(folder)
    return folders[: limit or None]


def main(arguments: Sequence[str]) -> int:
    """Verify, print what is wrong, and say how many are proved."""
    parser = argparse.ArgumentParser(prog="python -m etude.envserver.tasks.verify")
    parser.add_argument("folder", type=Path, help="a task folder, or a folder of them")
    parser.add_argument("--limit", type=int, default=0, help="at most this many; 0 means all")
    given = parser.parse_args(arguments)
    try:
        chosen = _chosen(given.folder, given.limit)
        found = asyncio.run(verify(chosen))
    except UserError as error:
        return exits.explain(error)
    for finding in found:
        sys.stderr.write(f"{finding.task_id}: {finding.what}\n")
    proved = len(chosen) - len({finding.task_id for finding in found})
    sys.stdout.write(f"{proved} of {len(chosen)} tasks: solution 1, doing nothing 0\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
