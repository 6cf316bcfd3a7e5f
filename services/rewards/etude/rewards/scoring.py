"""Scoring of one group: read the task, run the hidden tests, measure, apply the rubric."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from etude.common import stores
from etude.common.api.run.rewards import JUDGED
from etude.common.api.storage import Storage
from etude.common.errors import CorruptError, UnavailableError, UserError
from etude.common.harbor import task as harbor_task
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions.base import FinishedRollout, MeasuredPenalty
from etude.rewards.functions.verifier import Verifier
from etude.rewards.grading import GradingJob
from etude.rewards.judge_client import JudgeClient
from etude.rewards.rubric import RewardValue, Rubric, RubricEntry, broken_function
from etude.rewards.steps import StepJob, grade_steps, make_step_jobs
from etude.v1 import rollout_pb2


class GradedTask(NamedTuple):
    """A task, prepared for grading."""

    job: GradingJob
    digest: str
    steps: tuple[StepJob, ...]
    """Of a task of several."""
    originals: Mapping[str, bytes]
    """Its first files, if a function of the rubric compares with them."""


@dataclass(slots=True)
class Scorer:
    """Scores groups; its only state is the verifier's cache of grades."""

    rubric: Rubric
    verifier: Verifier
    storage: Storage
    scratch: Path
    judge: JudgeClient = field(default_factory=JudgeClient)

    async def score(
        self,
        task_uri: str,
        pool: str,
        rollouts: Sequence[rollout_pb2.Rollout],
        *,
        deadline_s: float,
    ) -> list[RewardValue | Fault]:
        """The outcome of each rollout, in order, by a deadline on the monotonic clock.

        A rollout that is graded by then counts, even if its siblings are lost.
        """
        try:
            task = await asyncio.to_thread(self._task, task_uri, pool, deadline_s)
        except (UserError, CorruptError) as error:
            return [Fault(FaultReason.INVALID_TASK, str(error))] * len(rollouts)
        except UnavailableError as error:
            return [Fault(FaultReason.ENVIRONMENT_LOST, str(error))] * len(rollouts)
        if task.steps:
            grades = await grade_steps(self.verifier, task.job.task, task.steps, rollouts)
        else:
            grades = await self.verifier.grade(task.job, task.digest, rollouts)
        outcomes = await asyncio.gather(
            *(
                self._score(rollout, grade, task.job, task.originals, rollouts)
                for rollout, grade in zip(rollouts, grades, strict=True)
            )
        )
        ambiguity = task.job.task.ambiguity
        return self.rubric.settle_deferrals(rollouts, outcomes, ambiguity=ambiguity)

    async def _score(
        self,
        rollout: rollout_pb2.Rollout,
        grade: float | Fault,
        job: GradingJob,
        originals: Mapping[str, bytes],
        siblings: Sequence[rollout_pb2.Rollout],
    ) -> RewardValue | Fault:
        """Score a rollout alone: measure what functions need, and add up."""
        if isinstance(grade, Fault):
            return grade
        finished = FinishedRollout(
            record=rollout,
            success=grade,
            instruction=job.task.instruction,
            originals=originals,
            has_image=bool(job.task.image),
            ask_judge=self.judge.judge,
            siblings=siblings,
        )
        measured: dict[str, float] = {}
        for entry in self.rubric.entries:
            penalty = await self._measure(entry, finished, left_s=job.left_s)
            if isinstance(penalty, Fault):
                return penalty
            if penalty is not None:
                measured[entry.name] = penalty
        return self.rubric.score(rollout, grade, measured)

    async def _measure(
        self, entry: RubricEntry, rollout: FinishedRollout, *, left_s: float
    ) -> float | Fault | None:
        """Penalty of a function that runs something; None for the others."""
        if not isinstance(entry.implementation, MeasuredPenalty):
            return None
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await entry.implementation.measure(rollout, entry.parameters)
        except TimeoutError:
            reason = FaultReason.JUDGE_FAILED if entry.function in JUDGED else None
            what = f"{entry.name}: no value within the deadline of its group"
            return Fault(reason or FaultReason.GRADER_ERROR, what)
        except Exception as error:  # a package's own mistake  # noqa: BLE001
            return broken_function(entry, error)

    def _originals(self, task: harbor_task.HarborTask) -> Mapping[str, bytes]:
        """First files of a task, if a function of the rubric compares with them."""
        is_read = any(
            isinstance(each.implementation, MeasuredPenalty) and each.implementation.reads_originals
            for each in self.rubric.entries
        )
        return harbor_task.read_files(task.environment) if is_read else {}

    def _task(self, uri: str, pool: str, deadline_s: float) -> GradedTask:
        with stores.temporary_folder(uri, self.scratch, self.storage) as folder:
            task = harbor_task.read_task(folder)
            most_s = self.rubric.verifier.limit_s
            limit_s = min(task.verifier_timeout_s, most_s)
            job = GradingJob(task, uri, pool, task.tests(), limit_s, deadline_s)
            steps = tuple(make_step_jobs(task, job, limit_s=most_s))
            return GradedTask(job, task.digest(), steps, self._originals(task))
