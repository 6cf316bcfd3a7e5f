"""Contexts that are summed up by the policy: one rollout over several, each with exact tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion
from etude.agent.local import LocalEnvironment, ScriptedSampler
from etude.agent.rollout import run_rollout
from etude.agent.summaries import (
    LEFT_OUT,
    REQUEST,
    REQUEST_TOKENS,
    TOOL_NAME,
    SummarizeContext,
    SummaryLimits,
)
from etude.agent.token_policy import RolloutLimits, RolloutTask
from etude.agent.tool_calls import render_call
from etude.agent.toolsets import Toolset, toolset
from etude.agent.trajectory import RolloutEnding, Trajectory
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.common.errors import UserError

READ = render_call("read_file", {"path": "a.py"})
READ_LONG = render_call("read_file", {"path": "b.txt"})
LONG = " ".join(str(n) for n in range(200))
TURN_TOKENS, SUMMARY_TOKENS = 100, 20


async def refuse(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(command)


@dataclass(slots=True)
class RecordingSampler(ScriptedSampler):
    """Keeps the prompts and the room of each completion."""

    prompts: list[list[int]] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        self.prompts.append([*prompt_ids])
        self.rooms.append(max_tokens)
        self.seeds.append(seed)
        return await ScriptedSampler.generate(
            self, prompt_ids, max_tokens=max_tokens, temperature=temperature, seed=seed
        )


def tools_with_summaries() -> Toolset:
    return toolset("Compact").with_tool(TOOL_NAME, SummarizeContext)


async def roll_out(
    chat: ChatFormat, *turns: str, context: int, total: int = 100_000, content: str = LONG
) -> tuple[Trajectory, RecordingSampler]:
    sampler, tools = RecordingSampler(chat, iter(turns)), tools_with_summaries()
    files = {"a.py": b"x = 1\ny = 2\nz = 3\n", "b.txt": content.encode()}
    done = await run_rollout(
        sampler,
        LocalEnvironment(tools, MemoryWorkspace(files, refuse)),
        chat,
        tools,
        RolloutLimits(
            max_turns=64,
            max_turn_tokens=TURN_TOKENS,
            max_tokens=total,
            timeout_s=60,
            summaries=SummaryLimits(context_tokens=context, max_tokens=SUMMARY_TOKENS),
        ),
        RolloutTask(instruction="Fix it.", seed=7),
    )
    return done, sampler


def smallest_context(chat: ChatFormat) -> int:
    """Tokens of the smallest context that an opening leaves room in."""
    opening = len(chat.open(tools_with_summaries().system_prompt, "Fix it.", None).prompt)
    return opening + TURN_TOKENS + 2 * SUMMARY_TOKENS + REQUEST_TOKENS + 1


def test_a_context_has_more_room_where_the_request_is_shorter() -> None:
    usual, short = (
        SummaryLimits(context_tokens=2_048, max_tokens=64, request_tokens=tokens)
        for tokens in (REQUEST_TOKENS, 112)
    )
    room = 2_048 - TURN_TOKENS - 64 - 112
    assert usual.is_due(room, turn_tokens=TURN_TOKENS)
    assert not short.is_due(room, turn_tokens=TURN_TOKENS)
    assert short.is_due(room + 1, turn_tokens=TURN_TOKENS)
    openings = [each.most_opening(turn_tokens=TURN_TOKENS) for each in (usual, short)]
    assert openings[1] - openings[0] == REQUEST_TOKENS - 112


async def test_a_full_context_is_replaced_by_the_policys_summary(chat: ChatFormat) -> None:
    context = smallest_context(chat)
    done, _ = await roll_out(chat, READ, "I read a.py.", "Done.", context=context)
    first, second = (chat.decode(link.token_ids) for link in done.links)
    assert done.ending is RolloutEnding.STOPPED
    assert REQUEST in first
    assert "x = 1" in first, "the summary covers the results"
    assert first.endswith("<|assistant|>I read a.py.<|end|>")
    assert "Fix it." in second
    assert "<summary>\nI read a.py.\n</summary>" in second
    assert "x = 1" not in second
    assert second.endswith("<|assistant|>Done.<|end|>")


async def test_summaries_are_trained_like_every_token_of_the_policy(chat: ChatFormat) -> None:
    context = smallest_context(chat)
    done, sampler = await roll_out(chat, READ, "I read a.py.", "Done.", context=context)
    trained = [
        token
        for link in done.links
        for token, mask in zip(link.token_ids, link.loss_mask, strict=True)
        if mask
    ]
    assert trained == [
        token for turn in (READ, "I read a.py.", "Done.") for token in chat.completion(turn)
    ]
    costs = done.costs
    assert costs.completion_tokens == len(trained)
    assert costs.summary_tokens == len(chat.completion("I read a.py."))
    assert costs.turns == 2, "a summary is no turn"
    parts = costs.prompt_tokens + costs.completion_tokens + costs.tool_output_tokens
    assert parts == sum(len(link.token_ids) for link in done.links)
    assert len({*sampler.seeds}) == 3, "no two completions draw the same numbers"


@given(num_turns=st.integers(1, 12), extra=st.integers(0, 400), size=st.integers(0, 900))
async def test_no_context_is_longer_than_its_limit_and_prompts_are_exact_prefixes(
    chat: ChatFormat, num_turns: int, extra: int, size: int
) -> None:
    def turns() -> list[str]:
        return [READ if place % 2 == 0 else "Read." for place in range(2 * num_turns)]

    context = smallest_context(chat) + extra
    answers = iter([*turns(), *["Done."] * 64])
    sampler, tools = RecordingSampler(chat, answers), tools_with_summaries()
    done = await run_rollout(
        sampler,
        LocalEnvironment(tools, MemoryWorkspace({"a.py": b"x" * size}, refuse)),
        chat,
        tools,
        RolloutLimits(
            max_turns=num_turns,
            max_turn_tokens=TURN_TOKENS,
            max_tokens=100_000,
            timeout_s=60,
            summaries=SummaryLimits(context_tokens=context, max_tokens=SUMMARY_TOKENS),
        ),
        RolloutTask(instruction="Fix it."),
    )
    assert all(len(link.token_ids) <= context for link in done.links)
    for prompt, room in zip(sampler.prompts, sampler.rooms, strict=True):
        assert room > 0
        assert any([*link.token_ids[: len(prompt)]] == prompt for link in done.links)


async def test_results_without_room_go_to_the_next_context(chat: ChatFormat) -> None:
    context = smallest_context(chat) + len(chat.completion(LONG)) + 400
    turns = [READ] * 30 + [READ_LONG, "I read a.py.", "Done."]
    done, _ = await roll_out(chat, *turns, context=context)
    first, second = (chat.decode(link.token_ids) for link in done.links)
    assert LEFT_OUT in first
    assert "197 198 199" not in first
    assert "Results of your last calls:\n" in second
    assert "197 198 199" in second


async def test_results_that_fit_no_context_are_left_out(chat: ChatFormat) -> None:
    context = smallest_context(chat) + 100
    content = " ".join(str(n) for n in range(2_000))
    turns = [READ_LONG, "I read a.py.", "Done."]
    done, _ = await roll_out(chat, *turns, context=context, content=content)
    assert done.ending is RolloutEnding.STOPPED
    assert LEFT_OUT in chat.decode(done.links[1].token_ids)


async def test_the_policy_may_ask_for_a_summary_itself(chat: ChatFormat) -> None:
    asks = READ + render_call(TOOL_NAME, {})
    done, _ = await roll_out(chat, asks, "I read a.py.", "Done.", context=50_000)
    first, second = (chat.decode(link.token_ids) for link in done.links)
    assert "Write the summary." in first
    assert "I read a.py." in second
    assert [call.name for call in done.calls] == ["read_file", TOOL_NAME]


async def test_contexts_count_once_towards_the_limit_of_all(chat: ChatFormat) -> None:
    context = smallest_context(chat)
    opening = len(chat.open(tools_with_summaries().system_prompt, "Fix it.", None).prompt)
    turns = [READ, "Read."] * 32
    done, _ = await roll_out(chat, *turns, context=context, total=opening + 1_000)
    assert done.ending is RolloutEnding.LENGTH_LIMIT
    assert len(done.links) > 2
    costs = done.costs
    assert opening + costs.completion_tokens + costs.tool_output_tokens <= opening + 1_000


async def test_a_summary_that_is_cut_is_kept_as_it_is(chat: ChatFormat) -> None:
    asks, words = READ + render_call(TOOL_NAME, {}), "word " * 200
    done, sampler = await roll_out(chat, asks, words, "Done.", context=50_000)
    assert SUMMARY_TOKENS in sampler.rooms
    assert done.costs.summary_tokens == SUMMARY_TOKENS
    assert "<summary>\nword" in chat.decode(done.links[1].token_ids)


async def test_without_summaries_a_full_context_ends_the_rollout(chat: ChatFormat) -> None:
    tools = toolset("Compact")
    opening = len(chat.open(tools.system_prompt, "Fix it.", None).prompt)
    done = await run_rollout(
        ScriptedSampler(chat, iter([READ] * 64)),
        LocalEnvironment(tools, MemoryWorkspace({"a.py": b"x = 1\n"}, refuse)),
        chat,
        tools,
        RolloutLimits(max_turns=64, max_turn_tokens=100, max_tokens=opening + 90, timeout_s=60),
        RolloutTask(instruction="Fix it."),
    )
    assert (done.ending, len(done.links)) == (RolloutEnding.LENGTH_LIMIT, 1)


async def test_a_first_prompt_without_room_for_later_contexts_is_refused(chat: ChatFormat) -> None:
    least = smallest_context(chat)
    await roll_out(chat, "Done.", context=least)
    with pytest.raises(UserError, match="a context may have"):
        await roll_out(chat, "Done.", context=least - 1)


async def test_a_policy_of_one_context_refuses_to_sum_it_up(chat: ChatFormat) -> None:
    tools = toolset("Compact")
    done = await run_rollout(
        ScriptedSampler(chat, iter([render_call(TOOL_NAME, {}), "Done."])),
        LocalEnvironment(tools, MemoryWorkspace({}, refuse)),
        chat,
        tools,
        RolloutLimits(max_turns=4, max_turn_tokens=100, max_tokens=5_000, timeout_s=60),
        RolloutTask(instruction="Fix it."),
    )
    assert [call.is_malformed for call in done.calls] == [True]
