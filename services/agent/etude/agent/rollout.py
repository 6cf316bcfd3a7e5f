"""Rollouts: the turn loop over tokens that engines sample, from the first prompt to the end.

The policy's tokens go into the link as they were sampled; only tool output is tokenised. The
next prompt is the link itself, so a prompt is always the exact prefix of what was sampled on.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import grpc
from opentelemetry import trace
from typing_extensions import override

from etude.agent import completions
from etude.agent.chat import ChatFormat, Conversation, DeltaError, TemplateError
from etude.agent.chat.thinking import count_thinking, remove_thinking
from etude.agent.completions import Completion
from etude.agent.time_limit import time_limit
from etude.agent.tool_calls import MalformedCall, ParsedCall, cut_calls
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import Toolset
from etude.agent.trajectory import (
    ContextLink,
    LinkDraft,
    RolloutCosts,
    RolloutEnding,
    Trajectory,
)
from etude.agent.turns import (
    LaterSteps,
    PlatformFaultError,
    PolicyConversation,
    PolicyTurn,
    RolloutEnvironment,
    TurnLoop,
)
from etude.common.errors import EtudeError, Problem, UserError

log = logging.getLogger(__name__)
_TRACER = trace.get_tracer("etude.agent")


class Sampler(Protocol):
    """The policy, tokens in and tokens out."""

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        """Continue the prompt until a token that ends turns, which is kept, or max_tokens.

        The prompt is only lent: it grows after the call.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Limits that end a rollout if the policy does not."""

    max_turns: int
    max_turn_tokens: int
    """Tokens sampled in one turn."""
    max_tokens: int
    """Tokens of the whole transcript."""
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTask:
    """Instruction and sampling parameters of a rollout."""

    instruction: str
    temperature: float = 1.0
    seed: int | None = None
    """Unset: not reproducible."""
    steps: LaterSteps | None = None
    """Behind the instruction, which is the first step's then."""


def first_prompt(
    chat: ChatFormat, tools: Toolset, instruction: str, *, max_tokens: int
) -> Conversation:
    """Open a rollout's conversation, with its first prompt.

    Raises:
        UserError: the prompt leaves no room for a completion, or the chat template refuses it.
    """
    try:
        conversation = chat.open(tools.system_prompt, instruction, tools.shown)
    except TemplateError as error:
        raise UserError(
            Problem(
                reason="WrongChatTemplate",
                what=f"the chat template refuses the first prompt: {error}",
                where=str(chat.template.path),
                fix="correct the template, or give a model with one that takes instructions",
            )
        ) from error
    if len(conversation.prompt) >= max_tokens:
        raise UserError(
            Problem(
                reason="PromptTooLong",
                what=f"the first prompt has {len(conversation.prompt)} tokens; a transcript may"
                f" have {max_tokens}",
                where="rollout.maxTokens",
                fix="raise rollout.maxTokens, shorten the instruction, or use the Compact toolset",
            )
        )
    return conversation


async def run_rollout(  # noqa: PLR0913 - the parts of a rollout
    sampler: Sampler,
    environment: RolloutEnvironment,
    chat: ChatFormat,
    tools: Toolset,
    limits: RolloutLimits,
    task: RolloutTask,
    *,
    paused_s: Callable[[], float] = lambda: 0.0,
) -> Trajectory:
    """Run one rollout from the first prompt to its end.

    A turn that reaches its limit of tokens ends the rollout and runs nothing: its calls are
    incomplete. A limit on turns ends it after the calls of the last one were run. The limit on time
    does not count `paused_s`, the seconds that sampler and environment were away.

    Raises:
        PlatformFaultError: the sampler or the environment failed, or answered inconsistently.
        UserError: the first prompt leaves no room for a completion.
    """
    opened = first_prompt(chat, tools, task.instruction, max_tokens=limits.max_tokens)
    link = LinkDraft.start(opened.prompt)
    costs = RolloutCosts(prompt_tokens=len(opened.prompt))
    policy = _TokenPolicy(sampler, opened, tools, limits, task, link, costs)
    loop = TurnLoop(policy, environment, tools, limits.max_turns, costs, task.steps)
    try:
        async with time_limit(limits.timeout_s, paused_s=paused_s):
            ending = await loop.run()
    except TimeoutError:
        ending = RolloutEnding.TIME_LIMIT
    return Trajectory(
        links=(*policy.links, policy.link.finish()),
        costs=costs,
        ending=ending,
        final_message=loop.final_message,
        calls=tuple(loop.records),
    )


class SampledText(NamedTuple):
    """A turn that was sampled to its end."""

    text: str
    """Without its end."""
    calls: Sequence[ParsedCall | MalformedCall]
    message: str
    """The text outside of calls and thinking."""
    end: int

    @classmethod
    def read(cls, conversation: Conversation, tools: Toolset, ids: Sequence[int]) -> "SampledText":
        """Read the tokens of a turn, the last of which ends it."""
        chat = conversation.chat
        text = chat.decode(ids[:-1])
        # A call that the policy only thinks about is not one.
        spoken = remove_thinking(chat, text, tools.tool_format, is_open=conversation.opens_thinking)
        calls, message = tools.tool_format.parse(spoken)
        return cls(text, calls, message, ids[-1])

    def add_to(self, conversation: Conversation) -> None:
        """Note the turn: as calls if all of them parse, else as the text that was sampled."""
        parsed = [call for call in self.calls if isinstance(call, ParsedCall)]
        if len(parsed) < len(self.calls):
            parsed = []
        content = cut_calls(self.text, parsed)
        conversation.add_completion(self.text, end=self.end, content=content, calls=parsed)


@dataclass(slots=True)
class _TokenPolicy(PolicyConversation):
    """The policy of a running rollout: a sampler, and the tokens so far."""

    sampler: Sampler
    conversation: Conversation
    tools: Toolset
    limits: RolloutLimits
    task: RolloutTask
    link: LinkDraft
    costs: RolloutCosts
    links: list[ContextLink] = field(default_factory=list)
    """Finished ones, before a turn that the chat template could not be continued after."""
    _last: SampledText = field(default_factory=lambda: SampledText("", (), "", 0))

    @property
    def chat(self) -> ChatFormat:
        """The format of the conversation."""
        return self.conversation.chat

    @override
    async def sample(self, turn: int) -> PolicyTurn:
        completion = await self._generate(turn)
        ids = completion.token_ids
        self.costs.turns += 1
        self.costs.completion_tokens += len(ids)
        thinking = count_thinking(self.chat, ids, is_open=self.conversation.opens_thinking)
        self.costs.thinking_tokens += thinking
        self.link.append_sampled(ids, completion.logprobs, completion.spans)
        if ids[-1] not in self.chat.end_ids:
            self.costs.final_message_tokens += len(ids) - thinking
            return PolicyTurn((), self.chat.decode(ids), is_cut=True)
        self._last = SampledText.read(self.conversation, self.tools, ids)
        if not self._last.calls:
            self.costs.final_message_tokens += len(ids) - thinking
        return PolicyTurn(self._last.calls, self._last.message, is_cut=False)

    @override
    def append_results(self, outcomes: Sequence[ToolOutcome]) -> RolloutEnding | None:
        self._last.add_to(self.conversation)
        try:
            results = self.conversation.append_results([each.content for each in outcomes])
        except DeltaError as error:
            return self._start_link(error)
        return self._read(results)

    @override
    def append_request(self, outcomes: Sequence[ToolOutcome], request: str) -> RolloutEnding | None:
        self._last.add_to(self.conversation)
        try:
            added = self.conversation.append_request([each.content for each in outcomes], request)
        except DeltaError as error:
            return self._start_link(error)
        return self._read(added)

    def _read(self, results: Sequence[int]) -> RolloutEnding | None:
        """Let the policy read tokens; returns the ending if no room is left."""
        if len(self.link.token_ids) + len(results) >= self.limits.max_tokens:
            return RolloutEnding.LENGTH_LIMIT
        self.costs.tool_output_tokens += len(results)
        self.link.append_read(results)
        return None

    def _start_link(self, reason: DeltaError) -> RolloutEnding | None:
        """Go on in a new context, as the chat template cannot continue this one.

        Raises:
            PlatformFaultError: the template refuses the whole conversation.
        """
        log.warning("a new context starts: %s", reason)
        try:
            prompt = self.conversation.render_again()
        except TemplateError as error:
            raise PlatformFaultError(f"chat template: {error}") from error
        if len(prompt) >= self.limits.max_tokens:
            return RolloutEnding.LENGTH_LIMIT
        self.links.append(self.link.finish())
        self.link = LinkDraft.start(prompt)
        self.costs.prompt_tokens += len(prompt)
        return None

    async def _generate(self, turn: int) -> Completion:
        prompt = self.link.token_ids
        room = min(self.limits.max_turn_tokens, self.limits.max_tokens - len(prompt))
        started = time.monotonic()
        with _TRACER.start_as_current_span("chat") as span:
            try:
                completion = await self.sampler.generate(
                    prompt,
                    max_tokens=room,
                    temperature=self.task.temperature,
                    seed=_turn_seed(self.task.seed, turn),
                )
            except (EtudeError, OSError, TimeoutError, grpc.RpcError) as error:
                raise PlatformFaultError(f"sampler: {error}") from error
            wrong = completions.find_inconsistency(
                completion,
                max_tokens=room,
                vocab_size=self.chat.vocab_size,
                end_ids=self.chat.end_ids,
            )
            if wrong:
                raise PlatformFaultError(f"sampler: {wrong}")
            span.set_attributes(_usage(len(prompt), completion))
        self.costs.token_seconds += time.monotonic() - started
        return completion


def _turn_seed(seed: int | None, turn: int) -> int | None:
    # A seed per turn: with one seed all turns of a rollout would draw the same numbers.
    return None if seed is None else (seed * 1_000_003 + turn) % 2**63


def _usage(prompt_tokens: int, completion: Completion) -> dict[str, str | int]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "etude",
        "gen_ai.response.model": str(completion.spans[-1].sampled),
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": len(completion.token_ids),
    }
