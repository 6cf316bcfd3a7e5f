"""Verifier: the reward of a rollout's changes by hidden tests, and the blame for failed grading."""

import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from blake3 import blake3
from google.protobuf.message import DecodeError

from etude.common.api.run.rewards import VerifierParameters
from etude.common.harbor import task
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions import unfinished
from etude.rewards.functions.base import RewardFunction
from etude.rewards.grading import GradeAnswer, GradeInput, GradingJob, GradingSandboxes, LostGrade
from etude.v1 import environments_pb2, rollout_pb2

FUNCTION = RewardFunction(version="2", parameters=VerifierParameters)
"""Its value comes first, and every other function may read it."""
CACHED_RESULTS = 65_536


class Grade(float):
    """A reward from hidden tests, with its evidence."""

    __slots__ = ("evidence",)
    evidence: environments_pb2.GradeEvidence

    def __new__(cls, value: float, evidence: environments_pb2.GradeEvidence) -> Self:
        """A number with its evidence."""
        made = super().__new__(cls, value)
        made.evidence = evidence
        return made


class BrokenVerifier(NamedTuple):
    """The verifier ran and left no valid reward."""

    what: str
    evidence: environments_pb2.GradeEvidence = environments_pb2.GradeEvidence()


GradeResult = Grade | BrokenVerifier | LostGrade


def parse_answer(answer: GradeAnswer) -> GradeResult:
    """Parse an answer: one finite number from 0 to 1, or the reason that there is none."""
    if isinstance(answer, LostGrade):
        return answer
    evidence = answer.evidence
    if answer.timed_out:
        return BrokenVerifier("the hidden tests did not end within their limit", evidence)
    if not answer.HasField("reward_file"):
        output = answer.output[-200:].decode(errors="replace")
        return BrokenVerifier(f"no reward file was left: {output!r}", evidence)
    try:
        return Grade(task.parse_reward(answer.reward_file), evidence)
    except ValueError as error:
        return BrokenVerifier(str(error), evidence)


class _Key(NamedTuple):
    """Cache key of a grade, which is a function of nothing else."""

    task: str
    diff: str
    version: str


class Submission(NamedTuple):
    """The graded result of one rollout, with its digest."""

    digest: str
    handed: GradeInput


def make_submission(
    diff: environments_pb2.WorkspaceDiff, snapshot_id: str = "", *, is_end: bool = False
) -> Submission:
    """A diff in canonical order with its digest, so that equal changes are graded once.

    A snapshot of a rollout's end equals only itself: the state of services is unknown. Snapshots of
    what a task's set-up left are as good as each other.
    """
    ordered = environments_pb2.WorkspaceDiff()
    ordered.written.extend(sorted(diff.written, key=operator.attrgetter("path")))
    ordered.deleted.extend(sorted(diff.deleted))
    digest = blake3(ordered.SerializeToString(deterministic=True))
    digest.update(snapshot_id.encode() if is_end else b"")
    return Submission(digest.hexdigest(), GradeInput(ordered, snapshot_id))


BASE = make_submission(environments_pb2.WorkspaceDiff())
"""The empty diff: the unmodified repository."""


@dataclass(slots=True)
class Verifier:
    """Grades a group's distinct diffs, each once."""

    parameters: VerifierParameters
    sandboxes: GradingSandboxes
    _grades: OrderedDict[_Key, Grade] = field(default_factory=OrderedDict)

    async def grade(
        self,
        job: GradingJob,
        task_digest: str,
        rollouts: Sequence[rollout_pb2.Rollout],
        *,
        base: Submission = BASE,
    ) -> list[float | Fault]:
        """Grade each rollout with the hidden tests, in order.

        If the verifier breaks on a rollout's changes, the base is graded: if it breaks there too,
        the fault is the platform's; else the changes broke it, which is 0. Otherwise a policy could
        learn to have its failures masked.

        Args:
            job: what all diffs share.
            task_digest: of the task, or of a step of it.
            rollouts: of one group.
            base: the repository before any policy's change.
        """
        settled = [self._outcome_or_submission(job, rollout) for rollout in rollouts]
        diffs = dict(found for found in settled if isinstance(found, Submission))
        results = await self._results(job, task_digest, diffs)
        if any(isinstance(found, BrokenVerifier) for found in results.values()):
            results |= await self._results(job, task_digest, dict([base]))
        return [
            _outcome(found, results, base) if isinstance(found, Submission) else found
            for found in settled
        ]

    def _outcome_or_submission(
        self, job: GradingJob, rollout: rollout_pb2.Rollout
    ) -> float | Fault | Submission:
        """The outcome of a rollout that needs no test, else its submission."""
        if rollout.ending == rollout_pb2.ENDING_PLATFORM_FAULT:
            return Fault(FaultReason.ROLLOUT_FAULT, rollout.fault)
        if rollout.ending == rollout_pb2.ENDING_CHANGE_TOO_LARGE:
            return 0.0
        if self.parameters.only_when_finished and not unfinished.is_finished(rollout):
            return 0.0
        try:
            diff = environments_pb2.WorkspaceDiff.FromString(rollout.diff)
        except DecodeError as error:
            return Fault(FaultReason.ROLLOUT_FAULT, f"its diff cannot be read: {error}")
        if job.task.is_graded_in_fork and not rollout.snapshot_id:
            return Fault(FaultReason.ROLLOUT_FAULT, "its environment was not saved for a fork")
        return make_submission(diff, rollout.snapshot_id, is_end=job.task.is_graded_in_fork)

    async def _results(
        self, job: GradingJob, task_digest: str, handed: dict[str, GradeInput]
    ) -> dict[str, GradeResult]:
        """Results by the diff's digest, from the cache if it was graded before."""
        keys = {digest: _Key(task_digest, digest, FUNCTION.version) for digest in handed}
        results: dict[str, GradeResult] = {d: self._grades.get(keys[d], _NOT_YET) for d in handed}
        for attempt in range(1 + self.parameters.retries):
            missing = [digest for digest, found in results.items() if isinstance(found, LostGrade)]
            if not missing or job.left_s <= 0:
                break
            inputs = [handed[digest] for digest in missing]
            if attempt and not job.task.is_graded_in_fork:
                # The snapshot of the set-up may be lost with its host: the task is set up again.
                inputs = [each._replace(snapshot_id="") for each in inputs]
            answers = await self.sandboxes.grade(job, inputs)
            for digest, answer in zip(missing, answers, strict=True):
                results[digest] = self._remember(keys[digest], parse_answer(answer))
        return results

    def _remember(self, key: _Key, found: GradeResult) -> GradeResult:
        # A verifier may break on an overloaded host: the next group grades again.
        if isinstance(found, Grade):
            self._grades[key] = found
            if len(self._grades) > CACHED_RESULTS:
                self._grades.popitem(last=False)
        return found


_NOT_YET = LostGrade("its group's deadline passed before it was graded")


def _outcome(
    found: Submission, results: Mapping[str, GradeResult], base: Submission
) -> float | Fault:
    match results[found.digest]:
        case Grade() as grade:
            return grade
        case LostGrade(message):
            return Fault(FaultReason.ENVIRONMENT_LOST, message)
        case BrokenVerifier(_, evidence):
            return _blame(results[base.digest], evidence)


def _blame(base: GradeResult, evidence: environments_pb2.GradeEvidence) -> float | Fault:
    match base:
        case Grade():
            return Grade(0.0, evidence)
        case BrokenVerifier(what):
            return Fault(FaultReason.GRADER_ERROR, f"the unmodified repository too: {what}")
        case LostGrade(message):
            return Fault(FaultReason.ENVIRONMENT_LOST, message)
