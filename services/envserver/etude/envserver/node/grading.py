"""Hidden tests in a fresh sandbox: first files, the agent's artefacts, then the tests."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.errors import InvalidFieldError, crossing
from etude.envserver.drivers.base import (
    GRADE_OUTPUT_BYTES,
    Command,
    Driver,
    Outcome,
    SandboxError,
)
from etude.envserver.drivers.sandbox.layout import LOGS, warm
from etude.envserver.node import folders, trees
from etude.envserver.node.cache import ResultCache
from etude.envserver.node.trees import File, Tree
from etude.v1 import environments_pb2

MAX_JOB_BYTES = 64 << 20
MAX_TIMEOUT_S = 86_400


@dataclass(slots=True)
class Grader:
    """Grades with a driver. The same files, tests and command are run once."""

    driver: Driver
    cache: ResultCache
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def grade(
        self, source: Tree, job: environments_pb2.GradeJob
    ) -> environments_pb2.GradeResponse:
        """Run the verifier.

        Raises:
            InvalidFieldError: the job cannot be run as it is.
            SandboxError: the platform failed.
        """
        _check(job)
        workspace = trees.patched(source, job.diff, job.artefacts)
        tests = trees.files_of(job.files, "files")
        trees.check_layout(tests, "files")

        async def compute() -> tuple[Outcome, bool]:
            with crossing(SandboxError, "grading"):
                return await self._run(workspace, tests, job), True

        if warm(job.command) is None:
            outcome, _ = await compute()
        else:
            parts = (trees.identity(workspace), trees.identity(tests), job.command)
            key = " ".join(("grade", *parts, job.reward_path, str(job.timeout_seconds)))
            outcome = await self.cache.get(key, compute)
        return environments_pb2.GradeResponse(
            exit_code=outcome.exit_code,
            output=outcome.output,
            reward_file=outcome.collected,
            timed_out=outcome.timed_out,
        )

    async def _run(
        self, workspace: Tree, tests: Mapping[str, File], job: environments_pb2.GradeJob
    ) -> Outcome:
        # No state file in it: a successor sweeps what a dead node left here.
        folder = self.driver.leases / f"grade-{next(self._numbers)}"
        await asyncio.to_thread(self._prepare, folder, workspace, tests)
        try:
            return await self.driver.run(
                Command(
                    command=job.command,
                    workspace=folder / "workspace",
                    tests=folder / "tests",
                    timeout_s=job.timeout_seconds,
                    head_bytes=0,
                    tail_bytes=GRADE_OUTPUT_BYTES,
                    collect=job.reward_path,
                )
            )
        finally:
            await asyncio.to_thread(folders.remove, folder)

    def _prepare(self, folder: Path, workspace: Tree, tests: Tree) -> None:
        folder.mkdir()
        folders.write(folder / "workspace", workspace, self.driver.owner())
        folders.write(folder / "tests", tests, self.driver.owner())


def _check(job: environments_pb2.GradeJob) -> None:
    if not job.command:
        raise InvalidFieldError("command", "is empty")
    if not 1 <= job.timeout_seconds <= MAX_TIMEOUT_S:
        raise InvalidFieldError("timeout_seconds", f"must be between 1 and {MAX_TIMEOUT_S}")
    parts = job.reward_path.split("/")
    if parts[:2] != LOGS.split("/") or len(parts) < 3 or {"", ".", ".."} & set(parts[2:]):
        raise InvalidFieldError("reward_path", f"must be a file below {LOGS}")
