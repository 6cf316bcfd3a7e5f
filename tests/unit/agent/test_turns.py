"""The turn loop: exact tokens and honest endings."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.support.chat_tokens import encode_opening
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.local import LocalEnvironment, ScriptedSampler
from etude.agent.rollout import run_rollout
from etude.agent.token_policy import RolloutLimits, RolloutTask, Sampler
from etude.agent.tool_calls import ToolCall, render_call
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.toolsets import toolset
from etude.agent.trajectory import (
    MAX_RESULT_BYTES,
    PolicySpan,
    RolloutEnding,
    Trajectory,
    cut_text,
)
from etude.agent.turns import RolloutEnvironment
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.common.errors import UserError
from etude.common.weights import VersionId

COMPACT = toolset("Compact")
READ = render_call("read_file", {"path": "shop/core.py"})
EDIT = render_call(
    "search_replace", {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}
)
RUN = render_call("run_terminal", {"command": "pytest -q"})
BAD = "Error: bad call"
V0, V1 = VersionId(1, 0), VersionId(1, 1)


async def passing(command: str, timeout_s: float) -> ExecResult:
    return ExecResult(output=f"{command}: 3 passed\n".encode(), exit_code=0)


def shop() -> MemoryWorkspace:
    return MemoryWorkspace({"shop/core.py": b"def add(a, b):\n    return a - b\n"}, passing)


def limits(
    *, turns: int = 8, turn_tokens: int = 200, tokens: int = 8000, timeout_s: float = 60
) -> RolloutLimits:
    return RolloutLimits(
        max_turns=turns, max_turn_tokens=turn_tokens, max_tokens=tokens, timeout_s=timeout_s
    )


async def roll_out(
    chat: ChatFormat, *turns: str, at: RolloutLimits | None = None, tools: str = "Compact"
) -> Trajectory:
    workspace = shop()
    return await run_rollout(
        ScriptedSampler(chat, iter(turns)),
        LocalEnvironment(toolset(tools), workspace),
        chat,
        toolset(tools),
        at or limits(),
        RolloutTask(instruction="Fix add."),
    )


async def test_a_rollout_is_the_transcript_of_its_turns(chat: ChatFormat) -> None:
    done = await roll_out(chat, READ, EDIT + RUN, "Done.")
    (link,) = done.links
    assert chat.decode(link.token_ids) == (
        f"<|system|>{COMPACT.system_prompt}<|end|><|user|>Fix add.<|end|>"
        f"<|assistant|>{READ}<|end|>"
        "<|tool|><tool_response>def add(a, b):\n    return a - b</tool_response><|end|>"
        f"<|assistant|>{EDIT}{RUN}<|end|>"
        "<|tool|><tool_response>ok</tool_response>"
        "<tool_response>pytest -q: 3 passed</tool_response><|end|>"
        "<|assistant|>Done.<|end|>"
    )
    assert (done.ending, done.final_message) == (RolloutEnding.STOPPED, "Done.")


async def test_the_mask_covers_what_was_sampled_and_nothing_else(chat: ChatFormat) -> None:
    (link,) = (await roll_out(chat, READ, "Done.")).links
    own = [token for token, mask in zip(link.token_ids, link.loss_mask, strict=True) if mask]
    assert own == [*chat.completion(READ), *chat.completion("Done.")]
    assert len(link.sampler_logprobs) == len(link.token_ids)
    assert {lp for lp, m in zip(link.sampler_logprobs, link.loss_mask, strict=True) if m} == {-0.5}
    covered = [at for span in link.spans for at in range(span.start, span.end)]
    assert covered == [at for at, mask in enumerate(link.loss_mask) if mask]


async def test_costs_add_up(chat: ChatFormat) -> None:
    done = await roll_out(chat, READ, EDIT + RUN + "<tool_call>", "Done.")
    costs = done.costs
    assert (costs.turns, costs.tool_calls, costs.malformed_calls) == (3, 4, 1)
    assert costs.completion_tokens == sum(done.links[0].loss_mask)
    parts = costs.prompt_tokens + costs.completion_tokens + costs.tool_output_tokens
    assert parts == len(done.links[0].token_ids)
    assert costs.final_message_tokens == len(chat.completion("Done."))


@dataclass(slots=True)
class Recorder(Sampler):
    """Answers prepared completions and keeps what it was asked."""

    completions: list[Completion]
    prompts: list[list[int]] = field(default_factory=list)
    asked: list[tuple[int, float, int | None]] = field(default_factory=list)

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.asked.append((max_tokens, temperature, seed))
        return self.completions[len(self.prompts) - 1]


def completion(
    ids: Sequence[int], *, finish: FinishReason = FinishReason.STOP, version: VersionId = V0
) -> Completion:
    return Completion(ids, [-0.25] * len(ids), [PolicySpan(0, len(ids), version, version)], finish)


async def answered(
    chat: ChatFormat,
    *completions: Completion,
    at: RolloutLimits | None = None,
    seed: int | None = None,
) -> tuple[Trajectory, Recorder]:
    sampler = Recorder(list(completions))
    task = RolloutTask(instruction="Fix add.", temperature=0.5, seed=seed)
    environment = LocalEnvironment(COMPACT, shop())
    done = await run_rollout(sampler, environment, chat, COMPACT, at or limits(), task)
    return done, sampler


async def test_every_prompt_is_the_exact_prefix_of_what_follows(chat: ChatFormat) -> None:
    turns = [completion(chat.completion(text)) for text in (READ, EDIT, "Done.")]
    done, sampler = await answered(chat, *turns)
    ids = list(done.links[0].token_ids)
    for prompt, turn in zip(sampler.prompts, turns, strict=True):
        assert ids[: len(prompt)] == prompt
        assert ids[len(prompt) : len(prompt) + len(turn.token_ids)] == turn.token_ids
    assert len(sampler.prompts[-1]) + len(turns[-1].token_ids) == len(ids)


@given(st.text(alphabet="adio \n_(", min_size=1, max_size=12))
def test_an_unusual_tokenisation_is_kept_as_it_was_sampled(chat: ChatFormat, text: str) -> None:
    # One token per byte: text that the tokenizer would have written with fewer.
    letters = [token for letter in text for token in chat.encode_text(letter)]
    ids = [*letters, chat.end_id]
    done, _ = asyncio.run(answered(chat, completion(ids)))
    assert list(done.links[0].token_ids)[-len(ids) :] == ids
    assert done.final_message == text


async def test_spans_count_the_tokens_of_the_link(chat: ChatFormat) -> None:
    first = chat.completion(READ)
    cut = len(first) // 2
    spans = [PolicySpan(0, cut, V0, V0), PolicySpan(cut, len(first), V1, V0)]
    turn = Completion(first, [-0.1] * len(first), spans, FinishReason.STOP)
    done, sampler = await answered(chat, turn, completion(chat.completion("Done."), version=V1))
    start, last = len(sampler.prompts[0]), len(sampler.prompts[1])
    assert list(done.links[0].spans) == [
        PolicySpan(start, start + cut, V0, V0),
        PolicySpan(start + cut, start + len(first), V1, V0),
        PolicySpan(last, len(done.links[0].token_ids), V1, V1),
    ]
    assert (done.oldest, done.newest) == (V0, V1)


async def test_each_turn_draws_from_a_seed_of_its_own(chat: ChatFormat) -> None:
    turns = [completion(chat.completion(text)) for text in (READ, "Done.")]
    _, sampler = await answered(chat, *turns, seed=7)
    _, again = await answered(chat, *turns, seed=7)
    assert sampler.asked == again.asked
    assert sampler.asked[0][2] != sampler.asked[1][2]
    _, unseeded = await answered(chat, *turns)
    assert [seed for _, _, seed in unseeded.asked] == [None, None]
    assert {temperature for _, temperature, _ in unseeded.asked} == {0.5}


async def test_a_malformed_call_is_answered_recorded_and_counted(chat: ChatFormat) -> None:
    broken = "<tool_call><function=read_file><parameter=path>a</function></tool_call>"
    done = await roll_out(chat, broken + READ, "Done.", tools="Standard")
    assert "Error: malformed call: <parameter=path> without </parameter>" in chat.decode(
        done.links[0].token_ids
    )
    bad, good = done.calls
    assert (bad.name, bad.is_malformed, bad.is_error) == ("", True, True)
    assert "parameter=path" in bad.arguments_json
    assert (good.name, good.is_malformed, good.is_error) == ("read_file", False, False)
    assert good.arguments_json == '{"path":"shop/core.py"}'
    assert good.result.startswith("1|def add")
    assert done.costs.malformed_calls == 1


async def test_an_unknown_tool_counts_as_malformed_and_a_failed_one_does_not(
    chat: ChatFormat,
) -> None:
    missing = render_call("read_file", {"path": "none.py"})
    done = await roll_out(chat, render_call("fly", {}) + missing, "Done.")
    assert [(call.is_malformed, call.is_error) for call in done.calls] == [
        (True, True),
        (False, True),
    ]


async def test_finish_ends_the_rollout_after_the_calls_beside_it(chat: ChatFormat) -> None:
    finish = render_call("finish", {"message": "Fixed add."})
    done = await roll_out(chat, EDIT + finish, tools="Standard")
    assert (done.ending, done.final_message) == (RolloutEnding.STOPPED, "Fixed add.")
    assert [call.name for call in done.calls] == ["search_replace", "finish"]
    assert not done.calls[0].is_error
    assert done.links[0].token_ids[-1] == chat.end_id


async def test_a_turn_cut_by_its_limit_ends_the_rollout_and_runs_nothing(chat: ChatFormat) -> None:
    done = await roll_out(chat, EDIT, at=limits(turn_tokens=5))
    assert done.ending is RolloutEnding.LENGTH_LIMIT
    assert done.calls == ()
    assert sum(done.links[0].loss_mask) == 5
    assert done.final_message.startswith("<tool_call>")


async def test_the_transcript_never_outgrows_its_limit(chat: ChatFormat) -> None:
    opening = len(encode_opening(chat, COMPACT.system_prompt, "Fix add."))
    for room in range(1, 60):
        done = await roll_out(chat, READ, EDIT, "Done.", at=limits(tokens=opening + room))
        assert len(done.links[0].token_ids) <= opening + room
        assert done.ending in {RolloutEnding.LENGTH_LIMIT, RolloutEnding.STOPPED}


async def test_an_oversized_result_ends_the_rollout_before_it_is_read(chat: ChatFormat) -> None:
    opening = len(encode_opening(chat, COMPACT.system_prompt, "Fix add."))
    done = await roll_out(chat, READ, "Done.", at=limits(tokens=opening + 20))
    assert done.ending is RolloutEnding.LENGTH_LIMIT
    assert done.links[0].token_ids[-1] == chat.end_id
    assert done.calls[0].result.startswith("def add")


async def test_an_oversized_prompt_is_refused_with_the_way_out(chat: ChatFormat) -> None:
    with pytest.raises(UserError, match=r"first prompt has \d+ tokens"):
        await roll_out(chat, "Done.", at=limits(tokens=20))


async def test_the_last_turns_calls_are_run_and_not_answered(chat: ChatFormat) -> None:
    done = await roll_out(chat, READ, EDIT, "Done.", at=limits(turns=2))
    assert (done.ending, done.costs.turns) == (RolloutEnding.TURN_LIMIT, 2)
    assert done.calls[1].result == "ok"
    assert done.links[0].token_ids[-1] == chat.end_id


@dataclass(slots=True)
class Silent(Sampler):
    """Never answers."""

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")


async def test_a_rollout_out_of_time_keeps_what_it_has(chat: ChatFormat) -> None:
    environment = LocalEnvironment(COMPACT, shop())
    task = RolloutTask(instruction="Fix add.")
    at = limits(timeout_s=0.01)
    done = await run_rollout(Silent(), environment, chat, COMPACT, at, task)
    assert done.ending is RolloutEnding.TIME_LIMIT
    assert sum(done.links[0].loss_mask) == 0
    assert done.oldest is None


@dataclass(slots=True)
class Wordy(RolloutEnvironment):
    """Keeps the calls and answers each with a long text."""

    text: str
    calls: list[ToolCall] = field(default_factory=list)

    @override
    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        self.calls += calls
        return [ToolOutcome(content=self.text, kind=ErrorKind.TOOL) for _ in calls]


async def test_call_ids_are_unique_in_a_rollout_and_only_good_calls_travel(
    chat: ChatFormat,
) -> None:
    environment = Wordy("no")
    turns = [READ + "<tool_call>" + READ, READ, "<tool_call>", "Done."]
    task = RolloutTask(instruction="Fix add.")
    done = await run_rollout(
        ScriptedSampler(chat, iter(turns)), environment, chat, COMPACT, limits(), task
    )
    assert [call.call_id for call in environment.calls] == ["0.0", "0.2", "1.0"]
    assert [call.result for call in done.calls] == ["no", BAD, "no", "no", BAD]
    assert done.ending is RolloutEnding.STOPPED


async def test_a_call_record_keeps_both_ends_of_a_long_result(chat: ChatFormat) -> None:
    sampler = ScriptedSampler(chat, iter([READ, "Done."]))
    task, at = RolloutTask(instruction="Fix add."), limits(tokens=100_000)
    wordy = Wordy("é" * 5000 + "[exit code 1]")
    done = await run_rollout(sampler, wordy, chat, COMPACT, at, task)
    kept = done.calls[0].result
    assert kept.startswith("é" * 1500)
    assert kept.endswith("é[exit code 1]")
    assert len(kept.encode()) <= MAX_RESULT_BYTES
    assert done.calls[0].is_error


@given(text=st.text(max_size=40), times=st.integers(1, 400))
def test_a_result_within_the_limit_is_kept_whole(text: str, times: int) -> None:
    content = text * times
    is_short = len(content.encode()) <= MAX_RESULT_BYTES
    assert (cut_text(content) == content) is is_short
    assert len(cut_text(content).encode()) <= MAX_RESULT_BYTES


async def test_each_turn_leaves_its_trace_spans(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr("etude.agent.turns._TRACER", tracer)
    monkeypatch.setattr("etude.agent.token_policy._TRACER", tracer)
    with tracer.start_as_current_span("invoke_agent") as root:
        await roll_out(chat, READ, "Done.")
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["chat", "execute_tool", "chat", "invoke_agent"]
    assert {span.parent.span_id for span in spans if span.parent} == {
        root.get_span_context().span_id
    }
    usage = spans[0].attributes or {}
    assert usage["gen_ai.usage.output_tokens"] == len(chat.completion(READ))
    assert usage["gen_ai.response.model"] == "1.0"
