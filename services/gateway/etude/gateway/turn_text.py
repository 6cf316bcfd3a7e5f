"""Text of a turn: its thinking, its content and its calls, whole or piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from etude.agent.chat import ChatFormat
from etude.agent.chat.thinking import remove_thinking
from etude.agent.tool_calls import MalformedCall, ParsedCall, cut_calls
from etude.agent.tool_formats.base import ToolFormat
from etude.gateway.tool_forms import TextFormat
from etude.gateway.turn_request import TextPiece

_TAG_STARTS = "<[{"
"""First characters of everything that opens a call or thinking, in any format."""
_TAG_CHARS = 64
"""A call is recognised once so many of its characters are there."""


class TurnParts(NamedTuple):
    """Parts of a whole turn."""

    thinking: str
    content: str
    """Text without thinking and well-formed calls; malformed ones stay in it."""
    attempts: tuple[ParsedCall | MalformedCall, ...]
    """At calls, in their order."""

    @property
    def calls(self) -> tuple[ParsedCall, ...]:
        """Well-formed calls."""
        return tuple(each for each in self.attempts if isinstance(each, ParsedCall))

    @property
    def is_malformed(self) -> bool:
        """True if a call does not parse."""
        return len(self.calls) < len(self.attempts)


def read_turn(chat: ChatFormat, tool_format: ToolFormat, text: str, *, is_open: bool) -> TurnParts:
    """Take a turn's text apart.

    Args:
        chat: format of the model.
        tool_format: of the calls.
        text: of the turn, without its end.
        is_open: True if the prompt leaves thinking open.
    """
    spoken = remove_thinking(chat, text, tool_format, is_open=is_open)
    attempts, _ = tool_format.parse(spoken)
    calls = [each for each in attempts if isinstance(each, ParsedCall)]
    content = cut_calls(spoken, calls)
    thinking = _read_thinking(chat, text, is_open=is_open)
    if thinking is not None:
        content = content.lstrip()
    if calls:
        content = content.rstrip()
    return TurnParts(thinking or "", content, attempts)


def _read_thinking(chat: ChatFormat, text: str, *, is_open: bool) -> str | None:
    """Read the thinking that a turn begins with; None if it begins otherwise."""
    if chat.traits.thinking is None:
        return None
    opened, closed = chat.traits.thinking
    if not is_open:
        text = text.lstrip()
        if not text.startswith(opened):
            return None
        text = text.removeprefix(opened)
    return text.partition(closed)[0]


class _State(Enum):
    START = auto()
    """It is open whether the turn begins with thinking."""
    THINKING = auto()
    CONTENT = auto()
    HOLD = auto()
    """A call or more thinking began: the rest is read when the turn is finished."""


@dataclass(slots=True)
class TextSplitter:
    """Splits a growing text; never gives out content that the whole turn does not begin with."""

    chat: ChatFormat
    tool_format: ToolFormat
    is_open: bool = False
    """True if the prompt leaves thinking open."""
    is_raw: bool = False
    """True for a text that is given out as it is."""
    sent: str = ""
    """Content that was given out."""
    sent_thinking: str = ""
    _pending: str = ""
    _state: _State = _State.START
    _has_thinking: bool = False

    @property
    def _thinking(self) -> tuple[str, str] | None:
        return None if self.is_raw else self.chat.traits.thinking

    def feed(self, text: str) -> Iterator[TextPiece]:
        """Add text; gives out what is certain."""
        self._pending += text
        if self._state is _State.START:
            self._find_state()
        self._has_thinking |= self._state is _State.THINKING
        if self._state is _State.THINKING and (thinking := self._take_thinking()):
            self.sent_thinking += thinking
            yield TextPiece(thinking, is_thinking=True)
        if self._state is _State.CONTENT and (content := self._take_content()):
            self.sent += content
            yield TextPiece(content, is_thinking=False)

    def finish(self, parts: TurnParts) -> Iterator[TextPiece]:
        """Give out what is left of the whole turn."""
        if rest := _remainder(parts.thinking, self.sent_thinking):
            yield TextPiece(rest, is_thinking=True)
        if rest := _remainder(parts.content, self.sent):
            yield TextPiece(rest, is_thinking=False)

    def _find_state(self) -> None:
        if self._thinking is None:
            self._state = _State.CONTENT
            return
        opened, _ = self._thinking
        start = self._pending.lstrip()
        if self.is_open:
            self._state = _State.THINKING
        elif start.startswith(opened):
            self._pending = start.removeprefix(opened)
            self._state = _State.THINKING
        elif not opened.startswith(start):
            self._state = _State.CONTENT

    def _take_thinking(self) -> str:
        assert self._thinking is not None  # noqa: S101 - else the state is another
        closed = self._thinking[1]
        place = self._pending.find(closed)
        if place < 0:
            place = max(0, len(self._pending) - len(closed) + 1)
            taken, self._pending = self._pending[:place], self._pending[place:]
            return taken
        taken, self._pending = self._pending[:place], self._pending[place + len(closed) :]
        self._state = _State.CONTENT
        return taken

    def _take_content(self) -> str:
        if not self.sent and self._has_thinking:
            self._pending = self._pending.lstrip()
        end = self._find_certain_end()
        # Blanks before a call are no content.
        taken = self._pending[:end].rstrip()
        self._pending = self._pending[len(taken) :]
        return taken

    def _find_certain_end(self) -> int:
        """Position up to which no call and no thinking begins."""
        if isinstance(self.tool_format, TextFormat) and self._thinking is None:
            return len(self._pending)
        place = 0
        while place < len(self._pending):
            if self._pending[place] in _TAG_STARTS:
                rest = self._pending[place:]
                if self._opens_more(rest):
                    self._state = _State.HOLD
                    return place
                if len(rest) < _TAG_CHARS:
                    return place
            place += 1
        return place

    def _opens_more(self, text: str) -> bool:
        thinking = self._thinking
        if thinking is not None and text.startswith(thinking[0]):
            return True
        calls = self.tool_format.parse(text).calls
        return bool(calls) and calls[0].start == 0


def _remainder(whole: str, sent: str) -> str:
    return whole[len(sent) :] if whole.startswith(sent) else ""


@dataclass(slots=True)
class TokenDecoder:
    """Decodes growing tokens to growing text, in time proportional to what is new."""

    chat: ChatFormat
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    """Text that is certain: an unfinished character is not part of it."""
    _start: int = 0
    """First token that is decoded again: a token's text may depend on the one before."""
    _read: int = 0
    """Tokens whose text is certain."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that they complete."""
        self.token_ids += token_ids
        known = self.chat.decode(self.token_ids[self._start : self._read])
        whole = self.chat.decode(self.token_ids[self._start :])
        if len(whole) <= len(known) or whole.endswith("\ufffd"):
            return ""
        new = whole[len(known) :]
        self._start, self._read = self._read, len(self.token_ids)
        self.text += new
        return new
