"""Grading: hidden tests on the first files with the agent's artefacts, without the agent."""

import json
import re
from dataclasses import dataclass, field, replace

from etude.common.errors import InvalidFieldError, WrongStateError, crossing
from etude.envserver.drivers.base import (
    CapMissingError,
    CommandOutcome,
    Driver,
    SandboxError,
    Verification,
)
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.grading.graded_files import graded_files
from etude.envserver.host.leases.lease_fields import ISOLATION
from etude.envserver.host.leases.start_tracker import StartTracker
from etude.envserver.host.result_cache import ResultCache
from etude.envserver.host.workspace_sources import WorkspaceSource
from etude.envserver.isolation.sandbox_layout import LOGS
from etude.envserver.storage import folders, trees
from etude.v1 import environments_pb2

MAX_JOB_BYTES = 64 << 20
MAX_TIMEOUT_S = 86_400
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(slots=True)
class Grader:
    """Grades with a driver. The same files, tests and command are run once."""

    driver: Driver
    cache: ResultCache
    starts: StartTracker = field(default_factory=StartTracker)
    """Records how the sandboxes of grades started."""

    async def grade(
        self,
        source: WorkspaceSource,
        job: environments_pb2.GradeJob,
        *,
        template: str,
        fork: LeasedEnvironment | None = None,
    ) -> environments_pb2.GradeResponse:
        """Run the verifier.

        Args:
            source: the first files.
            job: what to run.
            template: template of a fresh sandbox.
            fork: the lease to grade; for a fork, also its sandbox.

        Raises:
            InvalidFieldError: the job cannot be run as it is.
            WrongStateError: the lease cannot be graded in the mode of the job.
            SandboxError: the platform failed.
        """
        work = _verification(source, job, template)
        mode = job.mode or environments_pb2.GRADE_MODE_CLEAN
        if mode == environments_pb2.GRADE_MODE_FORK:
            outcome = await self._grade_fork(fork, work)
        elif fork is not None and fork.record.is_prepared:
            outcome = await self._grade_prepared(fork, work, source)
        else:
            outcome = await self._grade_clean(work, fork)
        return environments_pb2.GradeResponse(
            exit_code=outcome.exit_code,
            output=outcome.output,
            reward_file=outcome.collected,
            timed_out=outcome.timed_out,
            evidence=environments_pb2.GradeEvidence(
                mode=mode,
                driver=self.driver.name,
                isolation=ISOLATION[self.driver.strength],
            ),
        )

    async def _grade_clean(
        self, work: Verification, lease: LeasedEnvironment | None
    ) -> CommandOutcome:
        async def compute() -> tuple[CommandOutcome, bool]:
            with crossing(SandboxError, "grading"):
                outcome = await self.driver.verify(work)
            if lease is not None and outcome.sandbox_start is not None:
                self.starts.record_grade(lease, outcome.sandbox_start)
            return outcome, True

        command = self.driver.repeatable_key(work.command)
        if not command:
            outcome, _ = await compute()
            return outcome
        parts = (
            "" if lease is None else lease.record.held.run_id,
            work.template,
            trees.tree_identity(work.workspace),
            trees.tree_identity(work.tests),
        )
        variables = json.dumps(sorted(work.environment.items()))
        ran = (command, variables, work.reward_path, str(work.timeout_s))
        key = " ".join(("grade", *parts, *ran))
        return await self.cache.get(key, compute)

    async def _grade_prepared(
        self, fork: LeasedEnvironment, work: Verification, source: WorkspaceSource
    ) -> CommandOutcome:
        """Grade on what a task's set-up left, in a lease that has it and no call of an agent.

        Without memory there is nothing but files, which a fresh sandbox gets.

        Raises:
            WrongStateError: calls of an agent have run.
            SandboxError: the platform failed, or the files are too large for a fresh sandbox.
        """
        written = {p: file for p, file in work.workspace.items() if source.tree.get(p) != file}
        deleted = sorted({*work.deleted} | (source.tree.keys() - work.workspace.keys()))
        async with fork.turn:
            fork.check_ready()
            if fork.results.digests():
                raise WrongStateError(
                    f"calls have run in lease {fork.lease_id} since its set-up: lease another"
                )
            with crossing(SandboxError, f"grading in lease {fork.lease_id}"):
                fork.close_for_calls()
                if self.driver.caps.memory:
                    changed = replace(work, workspace=written, deleted=deleted)
                    return await fork.sandbox.verify_prepared(changed)
                try:
                    found = await fork.sandbox.read_files(folders.DIFF)
                except folders.TooLargeError as error:
                    raise SandboxError(
                        f"what the task's set-up left is too large: {error}"
                    ) from error
        files = {p: file for p, file in found.tree.items() if p not in deleted} | written
        trees.check_layout(files, "diff.written")
        return await self._grade_clean(replace(work, workspace=files), fork)

    async def _grade_fork(
        self, fork: LeasedEnvironment | None, work: Verification
    ) -> CommandOutcome:
        if not self.driver.caps.memory:
            why = "a fork without what runs in it is a fresh sandbox: grade it clean"
            raise CapMissingError(self.driver.name, "memory", why)
        if not self.driver.has_services(work.template):
            raise WrongStateError(
                f"template {work.template!r} has no services that a fork would keep: grade it clean"
            )
        if fork is None:
            raise InvalidFieldError("mode", "fork needs a lease to grade in")
        async with fork.turn:
            fork.check_ready()
            if fork.results.digests():
                raise WrongStateError(
                    f"calls have run in lease {fork.lease_id}: launch a fork from its snapshot"
                )
            with crossing(SandboxError, f"grading in lease {fork.lease_id}"):
                await fork.make_workspace()
                fork.close_for_calls()
                return await fork.sandbox.verify(work)


def _verification(
    source: WorkspaceSource, job: environments_pb2.GradeJob, template: str
) -> Verification:
    """The verifier of a job.

    Raises:
        InvalidFieldError: the job cannot be run as it is.
    """
    _check(job)
    tests = trees.files_of(job.files, "files")
    trees.check_layout(tests, "files")
    files = graded_files(source, job)
    return Verification(
        template=template,
        workspace=files.written,
        deleted=files.deleted,
        tests=tests,
        command=job.command,
        timeout_s=job.timeout_seconds,
        reward_path=job.reward_path,
        environment=dict(job.environment),
    )


def _check(job: environments_pb2.GradeJob) -> None:
    if not job.command:
        raise InvalidFieldError("command", "is empty")
    if job.mode not in environments_pb2.GradeMode.values():
        raise InvalidFieldError("mode", f"{job.mode} is not a known mode")
    if any(not _VARIABLE.fullmatch(name) for name in job.environment):
        raise InvalidFieldError("environment", "has a name that is no name of a variable")
    if any("\0" in value for value in job.environment.values()):
        raise InvalidFieldError("environment", "has a value with a NUL")
    if not 1 <= job.timeout_seconds <= MAX_TIMEOUT_S:
        raise InvalidFieldError("timeout_seconds", f"must be between 1 and {MAX_TIMEOUT_S}")
    parts = job.reward_path.split("/")
    if parts[:2] != LOGS.split("/") or len(parts) < 3 or {"", ".", ".."} & set(parts[2:]):
        raise InvalidFieldError("reward_path", f"must be a file below {LOGS}")
