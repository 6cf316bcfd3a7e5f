"""Prompts of turns: messages of a client as the policy's chat template reads them."""

import itertools
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.agent.chat import ChatFormat, Conversation, DeltaError, TemplateError
from etude.agent.chat.traits import make_message
from etude.agent.tool_calls import ParsedCall
from etude.agent.tool_formats.xml import XmlFormat
from etude.agent.tool_messages import RenderedMessage, make_call_message
from etude.common.errors import InvalidFieldError
from etude.gateway.sessions import Branch, BranchNode, Continuation
from etude.gateway.tool_forms import NO_TOOLS, ToolForm
from etude.gateway.turn_request import RolloutMarks, TurnRequest, WireMessage

log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """Tokens to sample after, and the place of the turn in its session."""

    token_ids: list[int]
    branch: Branch
    form: ToolForm
    conversation: Conversation | None
    """None for a text that is continued as it is."""
    digest: bytes
    """Of the client's messages."""
    place: str
    """Place of the turn in its session, for metrics."""
    continued: BranchNode | None = None
    """Turn whose branch this one continues."""
    repeats_unknown: bool = False
    """True if nothing tells whether its user consented to what it repeats."""

    def claim(self, *, is_side: bool) -> "Prompt":
        """Take the place in the session: the branch continued, or one that is split off there."""
        prompt, node = self, self.continued
        if node is not None and (is_side or not node.can_continue):
            branch = node.branch.split(node.num_tokens)
            prompt = self._replace(branch=branch, place="split", continued=None)
        elif node is not None:
            node.is_continued = True
        return prompt


@dataclass(slots=True)
class MessageRenderer:
    """Renders the messages of one conversation, in their order."""

    chat: ChatFormat
    form: ToolForm
    num_calls: int = 0
    """Calls of the messages so far."""
    _calls: dict[str, Mapping[str, object] | None] = field(default_factory=dict)
    """Rendered calls by the client's ids; None where the template is given a turn as text."""
    _order: dict[str, int] = field(default_factory=dict)
    """Number of each call."""

    def note_turn(self, message: WireMessage, rendered: RenderedMessage) -> None:
        """Note the calls of a turn that is rendered already."""
        self._order.update(
            (call.call_id, self.num_calls + index) for index, call in enumerate(message.calls)
        )
        self.num_calls += len(message.calls)
        written = rendered.get("tool_calls") or [None] * len(message.calls)
        # The same id in a later turn is that turn's.
        self._calls.update(zip((call.call_id for call in message.calls), written, strict=False))

    def render(self, messages: Sequence[WireMessage]) -> list[RenderedMessage]:
        """Render messages that follow those so far; results in the order of their calls.

        Raises:
            InvalidFieldError: a result answers no call, or a call cannot be written.
        """
        rendered: list[RenderedMessage] = []
        for role, group in itertools.groupby(messages, key=lambda message: message.role):
            if role == "tool":
                rendered += self._render_results(sorted(group, key=self._find_place))
            else:
                rendered += map(self._render_one, group)
        return rendered

    def _find_place(self, result: WireMessage) -> int:
        """Find the number of the call that a result answers.

        Raises:
            InvalidFieldError: there is none.
        """
        place = self._order.get(result.call_id)
        if place is None:
            raise InvalidFieldError(
                "messages", f"a result answers {result.call_id[:80]!r}, which is no call before it"
            )
        return place

    def _render_results(self, results: Sequence[WireMessage]) -> Iterator[RenderedMessage]:
        for is_text, group in itertools.groupby(results, key=self._is_text_result):
            if is_text:
                # Texts have no ids: only their order tells which call each answers.
                yield from self.chat.make_text_results([result.content for result in group])
            else:
                yield from map(self._render_result, group)

    def _is_text_result(self, message: WireMessage) -> bool:
        return self.form.shown is None or self._calls.get(message.call_id) is None

    def _render_one(self, message: WireMessage) -> RenderedMessage:
        if message.role == "assistant" and message.calls:
            rendered = self._render_calls(message)
            self.note_turn(message, rendered)
            return rendered
        # Behind the opening a system message is a note of the client, which many templates refuse.
        role = "user" if message.role == "system" else message.role
        return make_message(role, message.content)

    def _render_result(self, message: WireMessage) -> RenderedMessage:
        call = self._calls[message.call_id]
        assert call is not None  # noqa: S101 - else it is a text's
        function = call["function"]
        assert isinstance(function, Mapping)  # noqa: S101 - as make_call_message writes it
        return {
            "role": "tool",
            "name": function["name"],
            "tool_call_id": call["id"],
            "content": message.content,
        }

    def _render_calls(self, message: WireMessage) -> RenderedMessage:
        calls = [
            ParsedCall(name=call.name, arguments=call.arguments, call_id=call.call_id)
            for call in message.calls
            if call.name
        ]
        if len(calls) < len(message.calls):
            return self._render_malformed(message, calls)
        if self.form.shown is not None:
            return make_call_message(self.form.shown, message.content, calls, first=self.num_calls)
        # A client may leave the tools out although earlier turns called them.
        tool_format = XmlFormat() if self.form is NO_TOOLS else self.form.tool_format
        try:
            return make_message("assistant", tool_format.render(calls, message.content))
        except ValueError as error:
            raise InvalidFieldError("messages", f"a call cannot be written: {error}") from error

    def _render_malformed(
        self, message: WireMessage, calls: Sequence[ParsedCall]
    ) -> RenderedMessage:
        """Render a turn with a call that does not parse, which its content holds, as text.

        Raises:
            InvalidFieldError: another of its calls cannot be written.
        """
        try:
            written = self.form.tool_format.render(calls) if calls else ""
        except ValueError as error:
            raise InvalidFieldError("messages", f"a call cannot be written: {error}") from error
        return make_message("assistant", message.content + written)


def render_opening(
    chat: ChatFormat, form: ToolForm, messages: Sequence[WireMessage]
) -> list[RenderedMessage]:
    """Render a whole conversation.

    Raises:
        InvalidFieldError: as `MessageRenderer.render`.
    """
    num_system = 0
    while num_system < len(messages) and messages[num_system].role == "system":
        num_system += 1
    texts = [*(message.content for message in messages[:num_system]), form.guide]
    system = "\n\n".join(filter(None, texts))
    rest = MessageRenderer(chat, form).render(messages[num_system:])
    if not system:
        return rest
    if chat.traits.opens_with_system:
        return [make_message("system", system), *rest]
    if rest and rest[0]["role"] == "user":
        return [make_message("user", f"{system}\n\n{rest[0]['content']}"), *rest[1:]]
    return [make_message("user", system), *rest]


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Builds the prompt of one request; sessions stay as they are."""

    chat: ChatFormat
    form: ToolForm
    request: TurnRequest
    marks: RolloutMarks
    digest: bytes

    def build(self, found: Continuation | None) -> Prompt:
        """Build the prompt, after the turn that the conversation continues.

        Raises:
            InvalidFieldError: the chat template refuses the conversation.
        """
        messages = self.request.messages
        if not messages or messages[-1].role == "assistant":
            raise InvalidFieldError("messages", "must end with a message that is not the policy's")
        try:
            if found is not None and not self.marks.compaction_of:
                prompt, added = self._continue(found), messages[found.num_messages :]
            else:
                prompt, added = self._open("new" if _is_opening(messages) else "break"), messages
        except TemplateError as error:
            raise InvalidFieldError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        is_unknown = not _is_opening(added) or bool(self.marks.compaction_of)
        return prompt._replace(repeats_unknown=is_unknown)

    def _open(self, place: str) -> Prompt:
        messages = render_opening(self.chat, self.form, self.request.messages)
        conversation = self.chat.open_transcript(messages, self.form.shown)
        branch = Branch(self.marks.rollout or uuid.uuid4().hex)
        branch.compaction_of = self.marks.compaction_of
        if branch.compaction_of:
            place = "compaction"
        return self._prompt(conversation.prompt, branch, conversation, place)

    def _continue(self, found: Continuation) -> Prompt:
        node, place = found
        messages = self.request.messages
        conversation = node.conversation.copy()
        renderer = MessageRenderer(
            self.chat, self.form, sum(len(each.calls) for each in messages[: place - 1])
        )
        renderer.note_turn(messages[place - 1], conversation.last_message)
        delta = renderer.render(messages[place:])
        try:
            added = conversation.append_messages(delta)
        except DeltaError as error:
            log.info("a branch starts, as the chat template cannot continue one: %s", error)
            branch = node.branch.split(0)
            return self._prompt(conversation.render_again(), branch, conversation, "rendered")
        token_ids = [*node.branch.token_ids[: node.num_tokens], *added]
        prompt = self._prompt(token_ids, node.branch, conversation, "continued")
        return prompt._replace(continued=node)

    def _prompt(
        self, token_ids: list[int], branch: Branch, conversation: Conversation, place: str
    ) -> Prompt:
        return Prompt(token_ids, branch, self.form, conversation, self.digest, place)


def _is_opening(messages: tuple[WireMessage, ...]) -> bool:
    return all(message.role != "assistant" for message in messages)
