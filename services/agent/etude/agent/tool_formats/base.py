"""Interface of a tool format, and the collection of attempts that all of them share."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from etude.agent.tool_calls import MalformedCall, ParsedCall, ParsedCompletion


class ToolFormat(Protocol):
    """The form in which one family of models writes tool calls in a completion.

    A parser takes time in proportion to the text. It never raises, and reads no call in the
    beginning of a text that it does not read in the whole.
    """

    name: str

    def parse(self, text: str) -> ParsedCompletion:
        """Split a completion, without its thinking and its end of turn, into calls and message."""
        ...

    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        """The text that `parse` reads as this message and these calls.

        Raises:
            ValueError: no text of this format is read so.
        """
        ...


class Attempts:
    """Attempts at calls, collected from the beginning of a text to its end."""

    def __init__(self, text: str) -> None:
        self.end = 0
        """Position after the last attempt."""
        self._text = text
        self._calls: list[ParsedCall | MalformedCall] = []
        self._message: list[str] = []

    def add_call(
        self, name: str, arguments: Mapping[str, object], *, start: int, end: int, call_id: str = ""
    ) -> None:
        """Add a well-formed call at [start, end); the text before it belongs to the message."""
        raw = self._take(start, end)
        self._calls.append(
            ParsedCall(name=name, arguments=arguments, raw=raw, start=start, call_id=call_id)
        )

    def add_malformed(self, reason: str, *, start: int, end: int) -> None:
        """Add an attempt at [start, end) that does not parse."""
        raw = self._take(start, end)
        self._calls.append(MalformedCall(reason=reason, raw=raw, start=start))

    def finish(self) -> ParsedCompletion:
        """The completion, taken apart; the text after the last attempt is message, too."""
        self._message.append(self._text[self.end :])
        return ParsedCompletion(tuple(self._calls), "".join(self._message))

    def _take(self, start: int, end: int) -> str:
        self._message.append(self._text[self.end : start])
        self.end = end
        return self._text[start:end]


def check_rendering(
    tool_format: ToolFormat, text: str, calls: Sequence[ParsedCall], message: str
) -> str:
    """Return a rendered text that is read back as it was meant.

    Raises:
        ValueError: it is read as something else, for example as a value holds a closing tag.
    """
    if tool_format.parse(text) != ParsedCompletion(tuple(calls), message):
        raise ValueError(f"no text of the format {tool_format.name} is read as these calls")
    return text
