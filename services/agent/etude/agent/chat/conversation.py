"""Conversation of a rollout: sampled tokens stay as they are, the harness adds what it says.

The next prompt is the tokens so far and a delta. The delta is cut out of a rendering of the whole
conversation in which a placeholder stands for the assistant's last turn: the text behind the
placeholder, without the end of the turn, which was sampled.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from etude.agent.chat.planting import choose_mark
from etude.agent.chat.template import RenderedMessage, TemplateError
from etude.agent.chat.traits import make_message

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
    tools: Sequence[Mapping[str, object]] | None
    prompt: list[int]
    """Tokens up to the first completion."""
    rewrites_history: bool = False
    """True once the template rendered an earlier turn otherwise than it was sampled."""
    _raw: list[RenderedMessage] = field(default_factory=list)
    _planted: list[RenderedMessage] = field(default_factory=list)
    _mark: str = ""
    _end: int | None = None
    """Token that ended the last completion."""
    _text: str = ""
    """Rendered text up to the last turn, as the tokens have it."""

    @classmethod
    def open(
        cls,
        chat: "ChatFormat",
        system: str,
        user: str,
        tools: Sequence[Mapping[str, object]] | None,
    ) -> "Conversation":
        """Render the first prompt.

        Raises:
            TemplateError: the template refuses it.
        """
        opened = cls(chat, tools, [])
        if system and chat.traits.has_system:
            opened._append(make_message("system", system), make_message("user", user))
        else:
            opened._append(make_message("user", f"{system}\n\n{user}" if system else user))
        opened.prompt = opened.render_again()
        return opened

    def add_completion(self, text: str, *, end: int | None = None) -> None:
        """Note the text of a completion and the token that ended it; they are never made again.

        Args:
            text: without the end.
            end: the token that ended it; the template's own end unless given.
        """
        self._append(make_message("assistant", text))
        self._end = end

    def append_results(self, results: Sequence[str]) -> list[int]:
        """Append the results of the last turn's calls; returns the tokens that follow the turn.

        Raises:
            DeltaError: the template does not tell them; `render_again` gives a new context.
        """
        place = len(self._raw) - 1
        self._append(*self._result_messages(results))
        placeholder = f"{self._mark}{self._mark}turn{self._mark}"
        reply = {**self._planted[place], "content": placeholder}
        shown = [*self._planted[:place], reply, *self._planted[place + 1 :]]
        try:
            text = self._render(shown)
        except TemplateError as error:
            raise DeltaError(str(error)) from error
        before, found, after = text.partition(placeholder)
        if not found or placeholder in after:
            raise DeltaError("the template renders the assistant's turn not at all, or twice")
        self._compare_history(before, self._planted[place]["content"])
        self._text += f"{self._planted[place]['content']}{after}"
        return self._encode_delta(after)

    def render_again(self) -> list[int]:
        """Render and encode the whole conversation: the prompt of a new context.

        Raises:
            TemplateError: the template refuses it.
        """
        self._text = self._render(self._planted)
        return self.chat.vocabulary.encode_marked(self._text, self._mark, is_start=True)

    def _append(self, *messages: RenderedMessage) -> None:
        """Append messages, with the tags in them marked."""
        texts = [each["content"] for each in messages]
        if not self._mark or any(self._mark[0] in text for text in texts):
            self._raw.extend(messages)
            self._mark = choose_mark(each["content"] for each in self._raw)
            self._planted = self.chat.plant(self._raw, self._mark)
            self._text = ""
            return
        self._raw.extend(messages)
        self._planted.extend(self.chat.plant(messages, self._mark))

    def _render(self, messages: Sequence[RenderedMessage]) -> str:
        return self.chat.template.render(messages, tools=self.tools, add_generation_prompt=True)

    def _result_messages(self, results: Sequence[str]) -> list[RenderedMessage]:
        if self.chat.traits.has_tool_role:
            return [make_message("tool", result) for result in results]
        wrapped = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
        return [make_message("user", "\n".join(wrapped))]

    def _compare_history(self, before: str, reply: str) -> None:
        if self.rewrites_history or before == self._text:
            return
        # The template may have put empty thinking before the placeholder, which has none.
        is_longer = before.startswith(self._text)
        if not is_longer or not self._render(self._planted).startswith(self._text + reply):
            self.rewrites_history = True
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
