"""Conversation of a rollout: sampled tokens stay as they are, the harness adds what it says.

The next prompt is the tokens so far and a delta. The delta is cut out of a rendering of the whole
conversation in which a placeholder stands for the assistant's last turn: the text behind the
placeholder, without the end of the turn, which was sampled. The placeholder is the turn's text or,
where the template takes tool calls, the name of its last call.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from etude.agent.chat.messages import map_texts, texts_of
from etude.agent.chat.planting import choose_mark
from etude.agent.chat.template import TemplateError
from etude.agent.chat.traits import make_message
from etude.agent.tool_calls import ParsedCall
from etude.agent.tool_messages import (
    RenderedMessage,
    ShownTools,
    make_call_message,
    make_result_messages,
    name_last_call,
)

if TYPE_CHECKING:
    from etude.agent.chat.format import ChatFormat

log = logging.getLogger(__name__)


class DeltaError(TemplateError):
    """The template's text does not tell what follows the assistant's last turn."""

    reason = "NoDelta"


@dataclass(slots=True)
class Conversation:
    """One conversation, as messages for the template; its tokens are the caller's."""

    chat: "ChatFormat"
    shown: ShownTools | None
    """Tools that the template shows; None if the system prompt describes them."""
    prompt: list[int]
    """Tokens up to the first completion."""
    num_text_turns: int = 0
    """Turns with calls that the template was given as text, as it refuses them as calls."""
    opens_thinking: bool = False
    """True if the tokens before the next completion leave thinking open."""
    _is_rewritten: bool = False
    _num_calls: int = 0
    _raw: list[RenderedMessage] = field(default_factory=list)
    _planted: list[RenderedMessage] = field(default_factory=list)
    _mark: str = ""
    _schemas: Any = None
    """Schemas of the tools, with the tags in them marked."""
    _reply: str = ""
    """Text of the last completion."""
    _end: int | None = None
    """Token that ended the last completion."""
    _text: str = ""
    """Rendered text up to the last turn, as the tokens have it, without marks."""

    @classmethod
    def open(
        cls, chat: "ChatFormat", system: str, user: str, shown: ShownTools | None
    ) -> "Conversation":
        """Render the first prompt.

        Raises:
            TemplateError: the template refuses it.
        """
        opened = cls(chat, shown, [])
        if system and chat.traits.opens_with_system:
            opened._append(make_message("system", system), make_message("user", user))
        else:
            opened._append(make_message("user", f"{system}\n\n{user}" if system else user))
        opened.prompt = opened.render_again()
        return opened

    @classmethod
    def open_transcript(
        cls, chat: "ChatFormat", messages: Sequence[RenderedMessage], shown: ShownTools | None
    ) -> "Conversation":
        """Render the prompt after messages, of which some may be turns of the assistant.

        Raises:
            TemplateError: the template refuses them.
        """
        opened = cls(chat, shown, [])
        opened._num_calls = sum(len(message.get("tool_calls", ())) for message in messages)
        opened._append(*messages)
        opened.prompt = opened.render_again()
        return opened

    def copy(self) -> "Conversation":
        """Copy the conversation as it is, so that it can go on in several ways."""
        return replace(self, _raw=[*self._raw], _planted=[*self._planted])

    @property
    def last_message(self) -> RenderedMessage:
        """The last message, as the template is given it."""
        return self._raw[-1]

    @property
    def rewrites_history(self) -> bool:
        """True once the template renders an earlier turn otherwise than it was sampled."""
        if not self._is_rewritten and self._text:
            self._compare_history(self._render(self._planted))
        return self._is_rewritten

    def add_completion(
        self,
        text: str,
        *,
        end: int | None = None,
        content: str = "",
        calls: Sequence[ParsedCall] = (),
    ) -> None:
        """Note the text of a completion and the token that ended it; they are never made again.

        Args:
            text: without the end.
            end: the token that ended it; the template's own end unless given.
            content: the text without its calls.
            calls: for a template that shows the tools; without any, it is given the text.
        """
        self._reply, self._end = text, end
        if self.shown is None or not calls:
            self._append(make_message("assistant", text))
            return
        self._append(make_call_message(self.shown, content, calls, first=self._num_calls))
        self._num_calls += len(calls)

    def append_results(self, results: Sequence[str]) -> list[int]:
        """Append the results of the last turn's calls; returns the tokens that follow the turn.

        Raises:
            DeltaError: the template does not tell them; `render_again` gives a new context.
        """
        turn = self._raw[-1]
        if "tool_calls" in turn:
            return self.append_messages(make_result_messages(turn, results))
        return self.append_messages(self.chat.make_text_results(results))

    def append_request(self, results: Sequence[str], request: str) -> list[int]:
        """Append results of the last turn's calls, if there were any, and the user's next request.

        Raises:
            DeltaError: the template does not tell what follows; `render_again` gives a new context.
        """
        turn, asked = self._raw[-1], make_message("user", request)
        if not results:
            return self.append_messages([asked])
        if "tool_calls" in turn:
            return self.append_messages([*make_result_messages(turn, results), asked])
        *first, last = self.chat.make_text_results(results)
        if last["role"] == "user":  # templates refuse two messages of the user in a row
            return self.append_messages(
                [*first, make_message("user", f"{last['content']}\n\n{request}")]
            )
        return self.append_messages([*first, last, asked])

    def append_messages(self, messages: Sequence[RenderedMessage]) -> list[int]:
        """Append what was said after the last turn; returns the tokens that follow the turn.

        Raises:
            DeltaError: the template does not tell them; `render_again` gives a new context.
        """
        place = len(self._raw) - 1
        if "tool_calls" in self._raw[place]:
            self._append(*messages)
            try:
                return self._cut_after_calls(place)
            except DeltaError as error:  # as of templates that take one call in a turn
                log.info("a turn with calls is rendered as text: %s", error)
            self.num_text_turns += 1
            del self._raw[place:], self._planted[place:]
            self._append(make_message("assistant", self._reply))
            messages = self._without_calls(messages)
        self._append(*messages)
        return self._cut_after_text(place)

    def render_again(self) -> list[int]:
        """Render and encode the whole conversation: the prompt of a new context.

        Raises:
            TemplateError: the template refuses it.
        """
        text = self._render(self._planted)
        self._text = self._without_marks(text)
        self.opens_thinking = self.chat.traits.opens_thinking(text)
        return self.chat.vocabulary.encode_marked(text, self._mark, is_start=True)

    def _append(self, *messages: RenderedMessage) -> None:
        """Append messages, with the tags in them marked."""
        self._raw.extend(messages)
        if self._mark and not any(self._mark[0] in text for text in texts_of(messages)):
            self._planted.extend(self.chat.plant(messages, self._mark))
            return
        schemas = [] if self.shown is None else self.shown.schemas
        self._mark = choose_mark(texts_of([*self._raw, {"tools": schemas}]))
        self._planted = self.chat.plant(self._raw, self._mark)
        plant = self.chat.vocabulary.finder.plant
        self._schemas = map_texts(schemas, lambda text: plant(text, self._mark))

    def _render(self, messages: Sequence[RenderedMessage]) -> str:
        tools = None if self.shown is None else self._schemas
        return self.chat.template.render(messages, tools=tools, add_generation_prompt=True)

    def _without_marks(self, text: str) -> str:
        return text.replace(self._mark, "")

    def _without_calls(self, messages: Sequence[RenderedMessage]) -> list[RenderedMessage]:
        """Messages after a turn of text: results of calls as such a turn has them."""
        changed: list[RenderedMessage] = []
        for is_result, group in itertools.groupby(messages, lambda each: each["role"] == "tool"):
            if is_result:
                changed += self.chat.make_text_results([each["content"] for each in group])
            else:
                changed += group
        return changed

    def _cut_after_text(self, place: int) -> list[int]:
        """Tokens after a turn that the template is given as text.

        Raises:
            DeltaError: the template does not tell them.
        """
        placeholder = self._placeholder
        reply = {**self._planted[place], "content": placeholder}
        before, after = self._split_at(place, reply)
        if placeholder in after:
            raise DeltaError("the template renders the assistant's turn twice")
        return self._take_delta(before, after)

    def _cut_after_calls(self, place: int) -> list[int]:
        """Tokens after a turn that the template is given as calls.

        Raises:
            DeltaError: the template refuses the calls, or does not tell the tokens.
        """
        placeholder = self._placeholder
        before, after = self._split_at(place, name_last_call(self._planted[place], placeholder))
        # Up to its end the turn is the template's own text, so its first end is the turn's.
        cut = self._find_end(after)
        if cut is None:
            raise DeltaError("the template writes no token that ends a turn with calls")
        # A result may tell the name of its call.
        name = self._planted[place]["tool_calls"][-1]["function"]["name"]
        return self._take_delta(before, after[cut:].replace(placeholder, name))

    @property
    def _placeholder(self) -> str:
        return f"{self._mark}{self._mark}turn{self._mark}"

    def _split_at(self, place: int, turn: RenderedMessage) -> tuple[str, str]:
        """Texts before and after the placeholder in a turn.

        Raises:
            DeltaError: the template does not render it.
        """
        shown = [*self._planted[:place], turn, *self._planted[place + 1 :]]
        try:
            text = self._render(shown)
        except TemplateError as error:
            raise DeltaError(str(error)) from error
        before, found, after = text.partition(self._placeholder)
        if not found:
            raise DeltaError("the template does not render the assistant's turn")
        return before, after

    def _find_end(self, text: str) -> int | None:
        """Position of the first tag that ends a turn."""
        vocabulary, place = self.chat.vocabulary, 0
        while tag := vocabulary.finder.find(text, place):
            if vocabulary.tags[tag[0]] in self.chat.end_ids:
                return tag.start()
            place = tag.end()
        return None

    def _take_delta(self, before: str, after: str) -> list[int]:
        self._compare_history(before)
        self._text += self._reply + self._without_marks(after)
        self.opens_thinking = self.chat.traits.opens_thinking(after)
        return self._encode_delta(after)

    def _compare_history(self, rendered: str) -> None:
        """Note if the template renders earlier turns otherwise than the tokens have them."""
        if self._is_rewritten or self._without_marks(rendered).startswith(self._text):
            return
        self._is_rewritten = True
        log.info("the chat template renders earlier turns otherwise than they were sampled")

    def _encode_delta(self, after: str) -> list[int]:
        """Encode what follows the assistant's text, without an end of the turn that was sampled."""
        vocabulary = self.chat.vocabulary
        tag = vocabulary.finder.find(after)
        if tag is not None and not after[: tag.start()].strip():
            token = vocabulary.tags[tag[0]]
            if token in self.chat.end_ids and self._end in {None, token}:
                # Cut as a token, not as text: some tags swallow the blanks behind them.
                return vocabulary.encode_marked(after[tag.start() :], self._mark, is_start=False)[
                    1:
                ]
        return vocabulary.encode_marked(after, self._mark, is_start=False)
