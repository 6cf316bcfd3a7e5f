"""Who is to blame when a rollout breaks: the sampler or the environment."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import pytest
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.local import LocalEnvironment, ScriptedSampler
from etude.agent.rollout import run_rollout
from etude.agent.token_policy import RolloutLimits, RolloutTask, Sampler
from etude.agent.tool_calls import ToolCall, render_call
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import toolset
from etude.agent.trajectory import PolicySpan, Trajectory
from etude.agent.turns import PlatformFaultError, RolloutEnvironment
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.common.errors import UnavailableError
from etude.common.weights import VersionId

COMPACT = toolset("Compact")
READ = render_call("read_file", {"path": "a.py"})
V0, V1 = VersionId(1, 0), VersionId(1, 1)


async def no_shell(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


async def roll_out(
    chat: ChatFormat, sampler: Sampler, environment: RolloutEnvironment
) -> Trajectory:
    limits = RolloutLimits(max_turns=8, max_turn_tokens=200, max_tokens=2000, timeout_s=60)
    task = RolloutTask(instruction="Fix add.")
    return await run_rollout(sampler, environment, chat, COMPACT, limits, task)


def working() -> RolloutEnvironment:
    return LocalEnvironment(COMPACT, MemoryWorkspace({}, no_shell))


@dataclass(slots=True)
class Answering(Sampler):
    """Answers with one completion, whatever it is."""

    completion: Completion

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        return self.completion


def completion(ids: Sequence[int], *, finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(ids, [-0.25] * len(ids), [PolicySpan(0, len(ids), V0, V0)], finish)


def broken_completions(chat: ChatFormat) -> dict[str, Completion]:
    ids = chat.completion("Done.")
    good = completion(ids)
    size = len(ids)
    return {
        "token_ids: 0 tokens": completion([]),
        "token_ids: 201 tokens": completion([5] * 200 + [chat.end_id]),
        "logprobs: 1 for": good._replace(logprobs=[-0.1]),
        "token_ids: a token outside of the vocabulary": completion([chat.vocab_size, chat.end_id]),
        "token_ids: a token outside": completion([-1, chat.end_id]),
        "logprobs: none is finite": good._replace(logprobs=[math.nan] * size),
        "logprobs: none is": good._replace(logprobs=[-math.inf] * size),
        "logprobs: one is no log-probability": good._replace(logprobs=[math.inf] * size),
        "logprobs: one is": good._replace(logprobs=[math.nan] * (size - 1) + [0.5]),
        "logprobs: one": good._replace(logprobs=[0.5] * size),
        "token_ids: sampling went on after": completion([chat.end_id, 5, chat.end_id]),
        "finish: STOP without": completion(ids[:-1]),
        "finish: ABORT without": completion(ids[:-1], finish=FinishReason.ABORT),
        "spans: 0 of": good._replace(spans=[]),
        "spans: [1, ": good._replace(spans=[PolicySpan(1, size, V0, V0)]),
        "spans: [0, 0)": good._replace(spans=[PolicySpan(0, 0, V0, V0)]),
        f"spans: {size + 1} of": good._replace(spans=[PolicySpan(0, size + 1, V0, V0)]),
        "spans: context 1.1 is newer": good._replace(spans=[PolicySpan(0, size, V0, V1)]),
    }


async def test_nonsense_from_the_sampler_is_its_fault_by_field(chat: ChatFormat) -> None:
    for text, nonsense in broken_completions(chat).items():
        with pytest.raises(PlatformFaultError) as caught:
            await roll_out(chat, Answering(nonsense), working())
        assert str(caught.value).startswith(f"sampler: {text}"), text


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
async def test_a_token_without_a_finite_logprob_leaves_its_rollout_to_the_learner(
    chat: ChatFormat, logprob: float
) -> None:
    good = completion(chat.completion("Done."))
    for place in range(len(good.logprobs)):
        logprobs = [logprob if at == place else -0.25 for at in range(len(good.logprobs))]
        trajectory = await roll_out(chat, Answering(good._replace(logprobs=logprobs)), working())
        [link] = trajectory.links
        sampled = [p for p, m in zip(link.sampler_logprobs, link.loss_mask, strict=True) if m]
        assert [math.isfinite(each) for each in sampled] == [
            at != place for at in range(len(sampled))
        ]


class Refusal(grpc.RpcError):
    """What a broken channel raises."""


@dataclass(slots=True)
class Failing(Sampler, RolloutEnvironment):
    """Fails in one way, as sampler and as environment."""

    error: Exception

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        raise self.error

    @override
    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        raise self.error


FAILURES = [UnavailableError("down"), ConnectionResetError("reset"), TimeoutError("late")]


@pytest.mark.parametrize("error", [*FAILURES, Refusal("gone")], ids=lambda e: type(e).__name__)
async def test_a_partner_that_fails_is_a_platform_fault_and_no_ending(
    chat: ChatFormat, error: Exception
) -> None:
    failing = Failing(error)
    with pytest.raises(PlatformFaultError, match=r"^sampler: ") as sampling:
        await roll_out(chat, failing, working())
    assert sampling.value.__cause__ is error
    sampler = ScriptedSampler(chat, iter([READ]))
    with pytest.raises(PlatformFaultError, match=r"^environment: ") as running:
        await roll_out(chat, sampler, failing)
    assert running.value.__cause__ is error


@dataclass(slots=True)
class Forgetful(RolloutEnvironment):
    """Answers all calls but the last."""

    @override
    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        return [ToolOutcome(content="ok") for _ in calls[1:]]


async def test_missing_results_are_the_environments_fault(chat: ChatFormat) -> None:
    sampler = ScriptedSampler(chat, iter([READ + READ]))
    with pytest.raises(PlatformFaultError, match="environment: 1 results for 2 calls"):
        await roll_out(chat, sampler, Forgetful())
