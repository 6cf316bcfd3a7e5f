"""Turns: a client's conversation becomes tokens, engines sample, the tokens become an answer."""

import asyncio
import contextlib
import logging
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from opentelemetry import trace

from etude.agent import completions
from etude.agent.chat import ChatFormat, Conversation
from etude.agent.chat.thinking import count_thinking
from etude.agent.completion_draft import CompletionDraft
from etude.agent.completions import Completion, FinishReason
from etude.agent.tool_calls import ParsedCall, cut_calls
from etude.agent.tool_messages import choose_call_id
from etude.common import telemetry
from etude.common.api_keys import KeyOwner
from etude.common.errors import InvalidFieldError, UnavailableError
from etude.gateway import metrics
from etude.gateway.arms import ArmChoice
from etude.gateway.prompts import Prompt, PromptBuilder
from etude.gateway.recording import SampledTurn, TurnRecorder
from etude.gateway.sessions import (
    Branch,
    BranchNode,
    Sessions,
    digest_beginnings,
    digest_owner,
)
from etude.gateway.tool_forms import NO_TOOLS, ToolForms
from etude.gateway.turn_request import (
    FinishedTurn,
    RolloutMarks,
    TextPiece,
    TurnEvent,
    TurnRequest,
    TurnStart,
    WireCall,
    WireMessage,
)
from etude.gateway.turn_text import TextSplitter, TokenDecoder, TurnParts, read_turn
from etude.gateway.upstream import EngineCall, EngineFleet

log = logging.getLogger(__name__)
_TRACER = trace.get_tracer("etude.gateway")

STREAM_TOKENS = 4
"""Tokens of one message of an engine where the client streams."""
WHOLE_TOKENS = 64
"""Elsewhere: an engine that ends takes at most so many with it."""
THREAD_CHARS = 64 << 10
"""Conversations with more new text are tokenised in a thread, beside other requests."""
NO_END = -1
"""No token ended the turn: what follows it begins with the end."""


@dataclass(frozen=True, slots=True)
class TurnService:
    """Serves turns of one policy."""

    chat: ChatFormat
    forms: ToolForms
    sessions: Sessions
    recorder: TurnRecorder | None
    """None: nothing is recorded."""
    fleets: Mapping[str, EngineFleet]
    """Engines of each channel."""

    async def serve(
        self,
        caller: KeyOwner,
        arm: ArmChoice,
        request: TurnRequest,
        marks: RolloutMarks,
        still_consents: Callable[[], bool],
    ) -> AsyncGenerator[TurnEvent, None]:
        """Serve one turn: its start, pieces if the client streams, and the whole.

        Args:
            caller: owner of the key, as of now.
            arm: of the caller.
            request: to serve.
            marks: of the client.
            still_consents: asked when the turn is whole; a record needs consent at both times.

        Raises:
            InvalidFieldError: the request cannot be served as it is.
            UnavailableError: no engine answers, or one answers inconsistently.
        """
        started_ns = time.time_ns()
        if self.recorder is not None:
            self.recorder.prepare(caller)
        prompt = await self._prepare(caller, request, marks)
        span = _TRACER.start_span("chat", attributes={"gen_ai.operation.name": "chat"})
        turn = _RunningTurn(
            self, caller, arm, request, marks, still_consents, prompt, started_ns, span
        )
        try:
            async with contextlib.aclosing(turn.run()) as events:
                async for event in events:
                    yield event
        finally:
            span.end()
            if not turn.is_finished:
                metrics.ABANDONED_TURNS.labels(arm.arm).inc()
                if prompt.continued is not None:
                    # A repeated request continues the branch as this one would have.
                    prompt.continued.is_continued = False

    async def count_tokens(self, caller: KeyOwner, request: TurnRequest) -> int:
        """Count the tokens of a request's prompt.

        Raises:
            InvalidFieldError: the request cannot be served as it is.
        """
        prompt = await self._prepare(caller, request, RolloutMarks())
        if prompt.continued is not None:
            prompt.continued.is_continued = False
        return len(prompt.token_ids)

    async def _prepare(self, caller: KeyOwner, request: TurnRequest, marks: RolloutMarks) -> Prompt:
        if request.prompt is not None:
            return self._prepare_text(request.prompt, marks)
        names = [caller.tenant, caller.user, marks.rollout, marks.tool_format]
        owner = digest_owner(names, request.tools)
        digests = digest_beginnings(owner, request.messages)
        found = self.sessions.find(digests, request.messages)
        first = 0 if found is None else found.num_messages
        form = self.forms.find(request.tools, marks.tool_format)
        builder = PromptBuilder(self.chat, form, request, marks, digests[-1])
        size = sum(len(message.content) for message in request.messages[first:])
        if size > THREAD_CHARS:
            prompt = await asyncio.to_thread(builder.build, found)
        else:
            prompt = builder.build(found)
        # Only now, and not in the thread: other requests may have continued the turn meanwhile.
        return prompt.claim(is_side=marks.is_side)

    def _prepare_text(self, text: str | tuple[int, ...], marks: RolloutMarks) -> Prompt:
        if isinstance(text, str):
            token_ids = self.chat.vocabulary.encode_tagged(text, is_start=True)
        else:
            token_ids = [*text]
        branch = Branch(marks.rollout or uuid.uuid4().hex)
        return Prompt(token_ids, branch, NO_TOOLS, None, b"", "text")


@dataclass(slots=True)
class _RunningTurn:
    """One turn while it is sampled."""

    service: TurnService
    caller: KeyOwner
    arm: ArmChoice
    request: TurnRequest
    marks: RolloutMarks
    still_consents: Callable[[], bool]
    prompt: Prompt
    started_ns: int
    span: trace.Span
    turn_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_finished: bool = False
    splitter: TextSplitter = field(init=False)
    decoder: TokenDecoder = field(init=False)

    def __post_init__(self) -> None:
        form = self.prompt.form if self.request.may_call else NO_TOOLS
        conversation = self.prompt.conversation
        self.splitter = TextSplitter(
            self.service.chat,
            form.tool_format,
            is_open=conversation is not None and conversation.opens_thinking,
            is_raw=conversation is None,
        )
        self.decoder = TokenDecoder(self.service.chat)

    @property
    def created_s(self) -> int:
        """Start of the turn, in seconds since the epoch."""
        return self.started_ns // 1_000_000_000

    async def run(self) -> AsyncGenerator[TurnEvent, None]:
        prompt, chat = self.prompt, self.service.chat
        fleet = self.service.fleets[self.arm.channel]
        max_tokens = self._limit((await fleet.describe()).max_model_len)
        draft = CompletionDraft(max_tokens, chat.end_ids)
        # Not around the whole: a generator that is closed would detach it in another context.
        with trace.use_span(self.span):
            metadata = telemetry.trace_metadata()
        call = EngineCall(
            turn_id=self.turn_id,
            session=prompt.branch.rollout,
            prompt=prompt.token_ids,
            options=self.request.sampling,
            message_tokens=STREAM_TOKENS if self.request.stream else WHOLE_TOKENS,
            metadata=metadata,
        )
        yield TurnStart(
            self.turn_id,
            prompt.branch.rollout,
            prompt.branch.branch_id,
            self.created_s,
            len(prompt.token_ids),
        )
        async with contextlib.aclosing(fleet.sample(call, draft)) as growth:
            async for _ in growth:
                if self.request.stream:
                    for piece in self._read_pieces(draft):
                        yield piece
        completion = draft.completion()
        self._check(completion, max_tokens)
        finished, parts = self._finish(completion, run_uid=",".join(sorted(draft.run_uids)))
        if self.request.stream:
            for piece in self.splitter.finish(parts):
                yield piece
        yield finished

    def _limit(self, max_model_len: int) -> int:
        """Limit of tokens of the turn.

        Raises:
            InvalidFieldError: the prompt fills the model's context.
        """
        room = max_model_len - len(self.prompt.token_ids)
        if room < 1:
            what = f"are {len(self.prompt.token_ids)} tokens; the model's context length is"
            raise InvalidFieldError("messages", f"{what} {max_model_len}")
        return min(self.request.sampling.max_tokens or room, room)

    def _read_pieces(self, draft: CompletionDraft) -> list[TextPiece]:
        """Read the text of new tokens, the end of the turn left out."""
        new = draft.token_ids[len(self.decoder.token_ids) :]
        if new and new[-1] in self.service.chat.end_ids:
            new = new[:-1]
        return [*self.splitter.feed(self.decoder.feed(new))] if new else []

    def _check(self, completion: Completion, max_tokens: int) -> None:
        """Refuse an answer that no sound engine gives.

        Raises:
            UnavailableError: the completion is not consistent.
        """
        chat = self.service.chat
        wrong = completions.find_inconsistency(
            completion, max_tokens=max_tokens, vocab_size=chat.vocab_size, end_ids=chat.end_ids
        )
        if wrong:
            log.error("turn %s: %s", self.turn_id, wrong)
            raise UnavailableError("an engine answered inconsistently")

    def _finish(self, completion: Completion, *, run_uid: str) -> tuple[FinishedTurn, TurnParts]:
        """Read the answer, and add the turn to its session and to the log."""
        chat, prompt, ids = self.service.chat, self.prompt, completion.token_ids
        end = ids[-1] if ids[-1] in chat.end_ids else NO_END
        text = chat.decode(ids if end == NO_END else ids[:-1])
        is_open = self.splitter.is_open
        if prompt.conversation is None:
            parts = TurnParts("", text, ())
        else:
            parts = read_turn(chat, self.splitter.tool_format, text, is_open=is_open)
        finished = FinishedTurn(
            turn_id=self.turn_id,
            rollout=prompt.branch.rollout,
            branch=prompt.branch.branch_id,
            created_s=self.created_s,
            version=str(completion.spans[-1].sampled),
            content=parts.content,
            thinking=parts.thinking,
            calls=self._name_calls(parts),
            is_cut=completion.finish is FinishReason.LENGTH,
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=len(ids),
            thinking_tokens=count_thinking(chat, ids, is_open=is_open),
        )
        metrics.TURNS.labels(prompt.place).inc()
        self._add_to_branch(completion, parts, run_uid=run_uid)
        if prompt.conversation is not None:
            calls = () if parts.is_malformed else parts.calls
            # As in a rollout: calls are cut out of the text with its thinking.
            content = cut_calls(text, calls)
            prompt.conversation.add_completion(text, end=end, content=content, calls=calls)
            self._remember(prompt.conversation, finished)
        self.is_finished = True
        return finished, parts

    def _name_calls(self, parts: TurnParts) -> tuple[WireCall, ...]:
        first = sum(len(message.calls) for message in self.request.messages)
        form = self.prompt.form
        listed = parts.attempts if form.names_malformed else parts.calls
        return tuple(
            WireCall(choose_call_id(call, first + index), call.name, form.read_arguments(call))
            if isinstance(call, ParsedCall)
            else WireCall(f"call{first + index:05d}", "", {"reason": call.reason, "raw": call.raw})
            for index, call in enumerate(listed)
        )

    def _add_to_branch(self, completion: Completion, parts: TurnParts, *, run_uid: str) -> None:
        """Extend the branch by the turn, and record it.

        Raises:
            UnavailableError: the branch has other tokens than the prompt begins with.
        """
        branch, token_ids = self.prompt.branch, self.prompt.token_ids
        if branch.token_ids != array("I", token_ids[: len(branch.token_ids)]):
            log.error("turn %s: its branch is not what its prompt begins with", self.turn_id)
            raise UnavailableError("the session changed meanwhile")
        branch.token_ids.extend(token_ids[len(branch.token_ids) :])
        branch.is_private |= self.prompt.repeats_unknown
        branch.token_ids.extend(completion.token_ids)
        if self.service.recorder is not None:
            caller = self.caller if self.still_consents() else self.caller._replace(consent="")
            self.service.recorder.record(
                SampledTurn(
                    turn_id=self.turn_id,
                    started_ns=self.started_ns,
                    caller=caller,
                    request=self.request,
                    marks=self.marks,
                    arm=self.arm.arm,
                    experiment=self.arm.experiment,
                    branch=branch,
                    num_tokens=len(branch.token_ids),
                    completion=completion,
                    run_uid=run_uid,
                    parts=parts,
                )
            )

    def _remember(self, conversation: Conversation, finished: FinishedTurn) -> None:
        message = WireMessage("assistant", finished.content, finished.calls)
        digest = digest_beginnings(self.prompt.digest, [message])[-1]
        branch = self.prompt.branch
        self.service.sessions.remember(
            digest, BranchNode(branch, len(branch.token_ids), conversation)
        )
