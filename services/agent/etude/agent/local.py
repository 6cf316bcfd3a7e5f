"""In-process sampler and environment for the turn loop: scripted turns, local tools."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.token_policy import Sampler
from etude.agent.tool_calls import ToolCall, call_from_json
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import Toolset, run_calls
from etude.agent.trajectory import PolicySpan
from etude.agent.turns import RolloutEnvironment
from etude.agent.workspace import Workspace
from etude.common.weights import VersionId

INITIAL = VersionId(1, 0)


@dataclass(slots=True)
class LocalEnvironment(RolloutEnvironment):
    """Runs calls on a workspace of this process."""

    tools: Toolset
    workspace: Workspace

    @override
    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        parsed = [call_from_json(call.name, call.arguments_json) for call in calls]
        return await run_calls(self.tools, self.workspace, parsed)


@dataclass(slots=True)
class ScriptedSampler(Sampler):
    """Samples scripted turns in order, each token with the same log-probability."""

    chat: ChatFormat
    turns: Iterator[str]
    version: VersionId = INITIAL
    logprob: float = -0.5

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        ids = self.chat.completion(next(self.turns))
        finish = FinishReason.STOP if len(ids) <= max_tokens else FinishReason.LENGTH
        ids = ids[:max_tokens]
        span = PolicySpan(0, len(ids), self.version, self.version)
        return Completion(ids, [self.logprob] * len(ids), [span], finish)
