"""Completions are recorded if the turn loop takes them: others would be repeated by every retry."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.token_policy import Sampler
from etude.agent.trajectory import PolicySpan
from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.trajectories.log import TrajectoryLog
from etude.trainer.rollouts.trajectories.recorded_rollout import Place, RecordedRollout
from etude.trainer.rollouts.trajectories.recorder import RecordedSampler, RolloutRecorder

CHAT = ChatFormat.load(Path(__file__).parents[2] / "agent" / "model")


class FixedSampler(Sampler):
    """Answers every prompt alike."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        return self.completion


def say(logprob: float, *, end: int) -> Completion:
    ids = CHAT.completion("Done.")
    spans = [PolicySpan(0, end, VersionId(1, 1), VersionId(1, 1))]
    return Completion(ids, [logprob] * len(ids), spans, FinishReason.STOP)


LENGTH = len(CHAT.completion("Done."))


@pytest.mark.parametrize(
    ("completion", "num_turns"),
    [
        (say(-0.5, end=LENGTH), 1),
        (say(math.nan, end=LENGTH), 0),
        (say(-0.5, end=LENGTH - 1), 0),
    ],
)
async def test_only_what_the_turn_loop_takes_is_recorded(
    completion: Completion, num_turns: int
) -> None:
    recorder = RolloutRecorder(
        log=TrajectoryLog.of_run(MemoryStore(), "run"),
        rollout_id="rl-000001-0",
        group_id="rl-000001",
        index=0,
        place=Place(1, 0, 0),
        rollout=RecordedRollout(),
        lost_s=lambda: 0.0,
        is_continued=False,
    )
    sampler = RecordedSampler(FixedSampler(completion), recorder, CHAT, OutageBudget(5))
    found = await sampler.generate([1, 2], max_tokens=50, temperature=1.0, seed=None)
    assert found is completion, "the turn loop says what is wrong with it"
    assert len(recorder.rollout.turns) == num_turns


async def test_a_wait_is_counted_while_it_lasts_and_ends_with_its_error() -> None:
    outage, end = OutageBudget(5), asyncio.Event()

    async def wait() -> None:
        await end.wait()

    waiting = asyncio.create_task(outage.count_wait(wait()))
    async with asyncio.timeout(20):
        while not outage.lost_s:  # noqa: ASYNC110 - the wait goes on
            await asyncio.sleep(0.01)
    assert not waiting.done()
    end.set()
    await waiting

    async def fail() -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        await outage.count_wait(fail())
