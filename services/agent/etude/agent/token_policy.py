"""The policy in a rollout's turn loop: tokens in and tokens out, over one context or several.

The policy's tokens go into the link as they were sampled; only what it reads is tokenised. The next
prompt is the link itself, so a prompt is always the exact prefix of what was sampled on.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import grpc
from opentelemetry import trace
from typing_extensions import override

from etude.agent import completions
from etude.agent.chat import ChatFormat, Conversation, DeltaError, TemplateError
from etude.agent.chat.thinking import count_thinking, remove_thinking
from etude.agent.completions import Completion
from etude.agent.summaries import LEFT_OUT, REQUEST, SummaryLimits, write_continuation
from etude.agent.tool_calls import MalformedCall, ParsedCall, cut_calls
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import Toolset
from etude.agent.trajectory import ContextLink, LinkDraft, RolloutCosts, RolloutEnding
from etude.agent.turns import LaterSteps, PlatformFaultError, PolicyConversation, PolicyTurn
from etude.common.errors import EtudeError, InvalidFieldError

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
    """Tokens of the whole transcript, over all contexts; what a context repeats does not count."""
    timeout_s: float
    summaries: SummaryLimits | None = None
    """Unset: the transcript is one context."""

    @property
    def context_tokens(self) -> int:
        """Tokens of one context."""
        return self.max_tokens if self.summaries is None else self.summaries.context_tokens

    @property
    def opening_tokens(self) -> int:
        """Most tokens of the first prompt: contexts after it open with it and a summary."""
        if self.summaries is None:
            return self.max_tokens
        return self.summaries.most_opening(turn_tokens=self.max_turn_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTask:
    """Instruction and sampling parameters of a rollout."""

    instruction: str
    temperature: float = 1.0
    seed: int | None = None
    """Unset: not reproducible."""
    steps: LaterSteps | None = None
    """Behind the instruction, which is the first step's then."""


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


@dataclass(slots=True, kw_only=True)
class TokenPolicy(PolicyConversation):
    """The policy of a running rollout: a sampler, and the tokens of its contexts so far."""

    sampler: Sampler
    conversation: Conversation
    tools: Toolset
    limits: RolloutLimits
    task: RolloutTask
    link: LinkDraft
    costs: RolloutCosts
    requests: list[str]
    """Of the user, so far."""
    opening_tokens: int
    """Of the first prompt."""
    links: list[ContextLink] = field(default_factory=list)
    """Finished ones, before a summary or a turn that the template could not be continued after."""
    _last: SampledText = field(default_factory=lambda: SampledText("", (), "", 0))
    _wants_summary: bool = False
    """True if the policy asked for one."""
    _is_summary_next: bool = False
    """True once the context ends with the request for a summary."""
    _unread: Sequence[str] = ()
    """Results that had no room in the context that is summed up."""

    @property
    def chat(self) -> ChatFormat:
        """The format of the conversation."""
        return self.conversation.chat

    @override
    async def sample(self, turn: int) -> PolicyTurn:
        if self._is_summary_next and not await self._summarize(turn):
            return PolicyTurn((), "", is_cut=True)
        ids = await self._sample_ids(turn)
        self.costs.turns += 1
        thinking = self._count_sampled(ids)
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
        results = [each.content for each in outcomes]
        before = self.conversation.copy()
        try:
            added = self.conversation.append_results(results)
        except DeltaError as error:
            return self._start_link(error)
        if self._needs_summary(len(added)):
            self.conversation = before
            return self._request_summary(results, fits=self._has_room(len(added)))
        return self._read(added)

    @override
    def append_request(self, outcomes: Sequence[ToolOutcome], request: str) -> RolloutEnding | None:
        self._last.add_to(self.conversation)
        self.requests.append(request)
        results = [each.content for each in outcomes]
        before = self.conversation.copy()
        try:
            added = self.conversation.append_request(results, request)
        except DeltaError as error:
            return self._start_link(error)
        if self._needs_summary(len(added)):
            self.conversation = before
            return self._request_summary(results, fits=self._has_room(len(added)))
        return self._read(added)

    @override
    def request_summary(self) -> None:
        self._wants_summary = True

    def _needs_summary(self, num_added: int) -> bool:
        """True if the context is summed up before the policy's next turn."""
        summaries = self.limits.summaries
        return summaries is not None and (
            self._wants_summary
            or summaries.is_due(
                len(self.link.token_ids) + num_added, turn_tokens=self.limits.max_turn_tokens
            )
        )

    def _has_room(self, num_added: int) -> bool:
        """True if the context takes these tokens, and a summary after them."""
        summaries = self.limits.summaries
        return summaries is not None and not summaries.is_due(
            len(self.link.token_ids) + num_added, turn_tokens=0
        )

    def _request_summary(self, results: Sequence[str], *, fits: bool) -> RolloutEnding | None:
        """Ask for a summary of the context: of the results too, if they have room."""
        shown = results if fits else [LEFT_OUT for _ in results]
        self._unread = () if fits else results
        self._wants_summary, self._is_summary_next = False, True
        try:
            added = self.conversation.append_request(shown, REQUEST)
        except DeltaError as error:
            return self._start_link(error)
        return self._read(added)

    async def _summarize(self, turn: int) -> bool:
        """Let the policy sum up the context, and open the one after it; False without room."""
        self._is_summary_next = False
        is_open = self.conversation.opens_thinking
        ids = await self._sample_ids(turn, is_summary=True)
        self.costs.summary_tokens += len(ids) - self._count_sampled(ids)
        text = self.chat.decode(ids[:-1] if ids[-1] in self.chat.end_ids else ids)
        spoken = remove_thinking(self.chat, text, self.tools.tool_format, is_open=is_open)
        _, summary = self.tools.tool_format.parse(spoken)
        unread, self._unread = self._unread, ()
        for results in (unread, [LEFT_OUT for _ in unread]):
            if self._open_context(write_continuation(self.requests, summary.strip(), results)):
                return True
        return False

    def _open_context(self, message: str) -> bool:
        """Go on in a new context that opens with a message; False if it has no room for a turn.

        Raises:
            PlatformFaultError: the template refuses the message.
        """
        try:
            opened = self.chat.open(self.tools.system_prompt, message, self.tools.shown)
        except TemplateError as error:
            raise PlatformFaultError(f"chat template: {error}") from error
        summaries = self.limits.summaries
        if summaries is None or summaries.is_due(len(opened.prompt), turn_tokens=0):
            return False
        self.conversation = opened
        self._open_link(opened.prompt)
        return True

    def _open_link(self, prompt: Sequence[int]) -> None:
        self.links.append(self.link.finish())
        self.link = LinkDraft.start(prompt)
        self.costs.prompt_tokens += len(prompt)

    def _count_sampled(self, ids: Sequence[int]) -> int:
        """Count the tokens of a completion; returns those of thinking."""
        thinking = count_thinking(self.chat, ids, is_open=self.conversation.opens_thinking)
        self.costs.completion_tokens += len(ids)
        self.costs.thinking_tokens += thinking
        return thinking

    def _read(self, results: Sequence[int]) -> RolloutEnding | None:
        """Let the policy read tokens; returns the ending if no room is left."""
        if self._room <= len(results):
            return RolloutEnding.LENGTH_LIMIT
        self.costs.tool_output_tokens += len(results)
        self.link.append_read(results)
        return None

    @property
    def _room(self) -> int:
        """Tokens that may still be read or sampled in this context."""
        context = self.limits.context_tokens - len(self.link.token_ids)
        used = self.costs.completion_tokens + self.costs.tool_output_tokens
        return min(context, self.limits.max_tokens - self.opening_tokens - used)

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
        if len(prompt) >= self.limits.context_tokens:
            return RolloutEnding.LENGTH_LIMIT
        self._open_link(prompt)
        return None

    async def _sample_ids(self, turn: int, *, is_summary: bool = False) -> Sequence[int]:
        """Sample a completion, and append it to the link.

        Raises:
            PlatformFaultError: the sampler failed, or answered inconsistently.
        """
        prompt, summaries = self.link.token_ids, self.limits.summaries
        most = self.limits.max_turn_tokens
        if is_summary and summaries is not None:
            most = summaries.max_tokens
        room = min(most, self._room)
        started = time.monotonic()
        with _TRACER.start_as_current_span("chat") as span:
            try:
                completion = await self.sampler.generate(
                    prompt,
                    max_tokens=room,
                    temperature=self.task.temperature,
                    seed=_turn_seed(self.task.seed, turn, is_summary=is_summary),
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
        try:
            self.link.append_sampled(*completion[:3], completion.routes)
        except InvalidFieldError as error:
            raise PlatformFaultError(f"sampler: {error}") from error
        return completion.token_ids


def _turn_seed(seed: int | None, turn: int, *, is_summary: bool) -> int | None:
    # A seed per completion: with one seed all of a rollout would draw the same numbers. A rollout
    # has at most 1,024 turns.
    place = turn + 1_024 * is_summary
    return None if seed is None else (seed * 1_000_003 + place) % 2**63


def _usage(prompt_tokens: int, completion: Completion) -> dict[str, str | int]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "etude",
        "gen_ai.response.model": str(completion.spans[-1].sampled),
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": len(completion.token_ids),
    }
