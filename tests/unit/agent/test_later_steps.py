"""Later steps of a task: the next request is read, never trained on, whatever form results have."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.local import LocalEnvironment, ScriptedSampler
from etude.agent.rollout import run_rollout
from etude.agent.token_policy import RolloutLimits, RolloutTask
from etude.agent.tool_calls import render_call
from etude.agent.toolsets import toolset
from etude.agent.trajectory import RolloutEnding, Trajectory
from etude.agent.turns import LaterSteps
from etude.agent.workspace import ExecResult, MemoryWorkspace

READ = render_call("read_file", {"path": "shop.py"})
FINISH = render_call("finish", {"message": "Baked."})


@dataclass(slots=True)
class Requests(LaterSteps):
    """Requests that follow one another; None cannot begin."""

    left: list[str | None]
    started: int = field(default=0)

    @property
    @override
    def is_last(self) -> bool:
        return not self.left

    @override
    async def begin_next(self) -> str | None:
        self.started += 1
        return self.left.pop(0)


async def passing(command: str, timeout_s: float) -> ExecResult:
    return ExecResult(output=b"fine\n", exit_code=0)


async def roll_out(
    chat: ChatFormat,
    turns: Sequence[str],
    steps: LaterSteps,
    *,
    tools: str = "Standard",
    max_turns: int = 8,
    max_tokens: int = 12_000,
) -> Trajectory:
    workspace = MemoryWorkspace({"shop.py": b"x = 1\n"}, passing)
    limits = RolloutLimits(
        max_turns=max_turns, max_turn_tokens=200, max_tokens=max_tokens, timeout_s=60
    )
    return await run_rollout(
        ScriptedSampler(chat, iter(turns)),
        LocalEnvironment(toolset(tools), workspace),
        chat,
        toolset(tools),
        limits,
        RolloutTask(instruction="Bake.", steps=steps),
    )


async def test_a_step_ends_with_a_turn_without_calls_or_with_finish(chat: ChatFormat) -> None:
    steps = Requests(["Ice it.", "Serve it."])
    done = await roll_out(chat, ["Baked.", READ + FINISH, "Served."], steps)
    assert (done.ending, done.final_message, steps.started) == (RolloutEnding.STOPPED, "Served.", 2)
    (link,) = done.links
    text = chat.decode(link.token_ids)
    assert "<|assistant|>Baked.<|end|><|user|>Ice it.<|end|><|assistant|>" in text
    after = text.partition(FINISH)[2]
    assert after.index("x = 1") < after.index("Finished.") < after.index("<|user|>Serve it.")
    own = [t for t, is_own in zip(link.token_ids, link.loss_mask, strict=True) if is_own]
    assert chat.decode(own) == f"Baked.<|end|>{READ}{FINISH}<|end|>Served.<|end|>"
    costs = done.costs
    assert costs.prompt_tokens + costs.completion_tokens + costs.tool_output_tokens == len(
        link.token_ids
    )


async def test_a_step_that_cannot_begin_ends_the_rollout(chat: ChatFormat) -> None:
    done = await roll_out(chat, ["Baked."], Requests([None, "Serve it."]))
    assert done.ending is RolloutEnding.STOPPED


@pytest.mark.parametrize("last", ["Baked.", FINISH])
async def test_no_step_begins_behind_the_last_turn(chat: ChatFormat, last: str) -> None:
    steps = Requests(["Ice it."])
    done = await roll_out(chat, [READ, last], steps, max_turns=2)
    assert (done.ending, steps.started) == (RolloutEnding.TURN_LIMIT, 0)


async def test_a_request_without_room_ends_the_rollout_before_it_is_read(chat: ChatFormat) -> None:
    done = await roll_out(chat, ["Baked."], Requests(["Ice it. " * 2_000]))
    assert done.ending is RolloutEnding.LENGTH_LIMIT
    assert "Ice it." not in chat.decode(done.links[0].token_ids)
