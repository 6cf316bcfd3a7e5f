"""Hidden tests in a fresh sandbox: first files, the agent's artefacts, then the tests."""

from dataclasses import dataclass

from etude.common.errors import InvalidFieldError, crossing
from etude.envserver import trees
from etude.envserver.drivers.base import Driver, Outcome, SandboxError, Verification
from etude.envserver.drivers.sandbox.layout import LOGS
from etude.envserver.node.cache import ResultCache
from etude.envserver.trees import Tree
from etude.v1 import environments_pb2

MAX_JOB_BYTES = 64 << 20
MAX_TIMEOUT_S = 86_400


@dataclass(slots=True)
class Grader:
    """Grades with a driver. The same files, tests and command are run once."""

    driver: Driver
    cache: ResultCache

    async def grade(
        self, source: Tree, job: environments_pb2.GradeJob, *, template: str
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

        work = Verification(
            template=template,
            workspace=workspace,
            tests=tests,
            command=job.command,
            timeout_s=job.timeout_seconds,
            reward_path=job.reward_path,
        )

        async def compute() -> tuple[Outcome, bool]:
            with crossing(SandboxError, "grading"):
                return await self.driver.verify(work), True

        if not self.driver.is_repeatable(job.command):
            outcome, _ = await compute()
        else:
            parts = (template, trees.identity(workspace), trees.identity(tests), job.command)
            key = " ".join(("grade", *parts, job.reward_path, str(job.timeout_seconds)))
            outcome = await self.cache.get(key, compute)
        return environments_pb2.GradeResponse(
            exit_code=outcome.exit_code,
            output=outcome.output,
            reward_file=outcome.collected,
            timed_out=outcome.timed_out,
        )


def _check(job: environments_pb2.GradeJob) -> None:
    if not job.command:
        raise InvalidFieldError("command", "is empty")
    if not 1 <= job.timeout_seconds <= MAX_TIMEOUT_S:
        raise InvalidFieldError("timeout_seconds", f"must be between 1 and {MAX_TIMEOUT_S}")
    parts = job.reward_path.split("/")
    if parts[:2] != LOGS.split("/") or len(parts) < 3 or {"", ".", ".."} & set(parts[2:]):
        raise InvalidFieldError("reward_path", f"must be a file below {LOGS}")
