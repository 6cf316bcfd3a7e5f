"""Scoring of one group: read the task, run the hidden tests, apply the rubric."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from etude.common import stores
from etude.common.api.storage import Storage
from etude.common.errors import CorruptError, UnavailableError, UserError
from etude.common.harbor import task as harbor_task
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions.verifier import Verifier
from etude.rewards.grading import GradingJob
from etude.rewards.rubric import RewardValue, Rubric
from etude.v1 import rollout_pb2


class GradedTask(NamedTuple):
    """A task, prepared for grading."""

    job: GradingJob
    digest: str


@dataclass(slots=True)
class Scorer:
    """Scores groups; its only state is the verifier's cache of grades."""

    rubric: Rubric
    verifier: Verifier
    storage: Storage
    scratch: Path

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
        outcomes = await self.verifier.grade(task.job, task.digest, rollouts)
        return [
            outcome if isinstance(outcome, Fault) else self.rubric.score(rollout, outcome)
            for rollout, outcome in zip(rollouts, outcomes, strict=True)
        ]

    def _task(self, uri: str, pool: str, deadline_s: float) -> GradedTask:
        task = harbor_task.read_task(stores.local_folder(uri, self.scratch, self.storage))
        limit_s = min(task.verifier_timeout_s, self.rubric.verifier.limit_s)
        job = GradingJob(task, uri, pool, task.tests(), limit_s, deadline_s)
        return GradedTask(job, task.digest())
