"""Passes over a suite, without a controller: every task and sample once, marked ones redrawn."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.rollouts.suites.runner import REDRAWS, Marks, Records, SuitePass, SuiteRunner
from etude.trainer.rollouts.tasks import Task
from etude.trainer.routing.table import Purpose
from etude.v1.journal_pb2 import JournalRollout
from etude.v1.rewards_pb2 import RewardRecord
from etude.v1.rollout_pb2 import Rollout


@dataclass
class Rollouts:
    """Runs groups in memory; a predicate on the rollout's id says what marked weights sampled."""

    is_marked: Callable[[str], bool] = lambda _: False
    requests: list[GroupRequest] = field(default_factory=list)
    redraws: list[Marks] = field(default_factory=list)

    async def run_group(self, request: GroupRequest) -> list[JournalRollout]:
        self.requests.append(request)
        names = {index: request.rollout_id(index) for index in request.indices}
        return [
            JournalRollout(
                rollout=Rollout(
                    rollout_id=name,
                    group_id=request.group_id,
                    task_id=request.task_id,
                    index=index,
                ),
                reward=RewardRecord(rollout_id=name, reward=1.0),
            )
            for index, name in names.items()
        ]

    async def find_marked(self, records: Records) -> Marks:
        names = [record.rollout.rollout_id for record in records]
        return {name: "quarantined_policy" for name in names if self.is_marked(name)}

    async def run(self, suite: SuitePass) -> Sequence[JournalRollout]:
        runner = SuiteRunner(
            run_group=self.run_group,
            find_marked=self.find_marked,
            on_redraw=self.redraws.append,
        )
        return await runner.run(suite)


def _suite(num_tasks: int, samples: int) -> SuitePass:
    tasks = [
        Task(task_id=f"set/{n}", uri=f"file:///set/{n}", environment="repos")
        for n in range(num_tasks)
    ]
    return SuitePass(
        prefix="eval-set-40-sampled",
        tasks=tasks,
        samples=samples,
        temperature=1.0,
        seed=3,
        limits=RolloutPolicy(),
    )


async def test_every_task_has_its_samples_once() -> None:
    rollouts = Rollouts()
    records = await rollouts.run(_suite(3, samples=4))
    assert Counter(record.rollout.task_id for record in records) == {
        f"set/{n}": 4 for n in range(3)
    }
    assert len({record.rollout.rollout_id for record in records}) == 12
    assert len({request.seed for request in rollouts.requests}) == 3
    assert {request.purpose for request in rollouts.requests} == {Purpose.EVALUATION}
    assert rollouts.redraws == []


async def test_equal_passes_ask_for_equal_groups() -> None:
    assert _suite(4, samples=2).requests() == _suite(4, samples=2).requests()


async def test_a_marked_sample_is_redrawn_alone() -> None:
    rollouts = Rollouts(is_marked=lambda name: name == "eval-set-40-sampled-1-2")
    records = await rollouts.run(_suite(2, samples=3))
    assert [request.indices for request in rollouts.requests] == [(0, 1, 2), (0, 1, 2), (2,)]
    names = {record.rollout.rollout_id for record in records}
    assert names == {
        *(f"eval-set-40-sampled-0-{n}" for n in range(3)),
        *(f"eval-set-40-sampled-1-{n}" for n in range(2)),
        "eval-set-40-sampled-1-2-again1",
    }
    assert rollouts.redraws == [{"eval-set-40-sampled-1-2": "quarantined_policy"}]


async def test_what_is_marked_after_all_redraws_is_masked_and_nothing_else() -> None:
    rollouts = Rollouts(is_marked=lambda name: name.startswith("eval-set-40-sampled-0-1"))
    records = await rollouts.run(_suite(1, samples=2))
    outcomes = {record.rollout.rollout_id: record.reward.WhichOneof("result") for record in records}
    assert outcomes == {
        "eval-set-40-sampled-0-0": "reward",
        f"eval-set-40-sampled-0-1-again{REDRAWS}": "fault",
    }
    assert len(rollouts.redraws) == REDRAWS
