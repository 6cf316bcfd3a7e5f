"""Calls inside of a block of tags, as DeepSeek's models write them: the walk over a text.

A block holds any number of calls. A call outside of a block is malformed, as the programs that
serve such models read none there.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.agent.tool_calls import ParsedCompletion
from etude.agent.tool_formats.base import Attempts
from etude.agent.tool_formats.json_calls import NamedCall, find_body


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrammar:
    """Tags of one format as patterns, and how the inside of a call is read."""

    block: str
    """The tag that opens a block, with the layout before it."""
    block_end: str
    """The tag that closes it."""
    call: str
    """The tag that opens a call."""
    call_end: str
    """The text, no pattern, of the tag that closes it."""
    other: str
    """Tags that have no place outside of calls."""
    body: re.Pattern[str]
    """Passes over the inside of a call, for `find_body`; the boundary is looked for after it."""
    read: Callable[[str], NamedCall]
    """Read a call, from the tag that opens it to its end; ValueError's text is for the policy."""
    _tag: re.Pattern[str] = field(init=False)
    _boundary: re.Pattern[str] = field(init=False)
    _after_call: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        closing = rf"(?P<end>{re.escape(self.call_end)})|(?P<block_end>{self.block_end})"
        first = rf"(?P<block>{self.block})\s*+(?P<first>{self.call})"
        tag = rf"{first}|{self.block}|(?P<call>{self.call})|{closing}|{self.other}"
        object.__setattr__(self, "_tag", re.compile(tag))
        object.__setattr__(self, "_boundary", re.compile(rf"{self.block}|{self.call}|{closing}"))
        object.__setattr__(self, "_after_call", re.compile(rf"\s*+{self.block_end}"))

    def parse(self, text: str) -> ParsedCompletion:
        """Split a text into calls and message, as `ToolFormat.parse` does."""
        attempts = Attempts(text)
        is_inside = False
        while tag := self._tag.search(text, attempts.end):
            is_inside = self._take(text, tag, attempts, is_inside=is_inside)
        return attempts.finish()

    def _take(self, text: str, tag: re.Match[str], attempts: Attempts, *, is_inside: bool) -> bool:
        """Add the attempt that begins with the tag; true when the block is open after it."""
        is_call = tag["first"] is not None or tag["call"] is not None
        if not is_call:
            attempts.add_malformed(
                f"{tag[0].strip()} without a call", start=tag.start(), end=tag.end()
            )
            return is_inside and tag["block_end"] is None
        is_inside = is_inside or tag["first"] is not None
        body = find_body(self.body, text, tag.end())
        boundary = None if body.is_open else self._boundary.search(text, body.end)
        if boundary is None or not boundary["end"]:
            end = len(text) if boundary is None else boundary.start()
            attempts.add_malformed(f"a call without {self.call_end}", start=tag.start(), end=end)
            return is_inside
        closing = self._after_call.match(text, boundary.end())
        end = boundary.end() if closing is None else closing.end()
        attempt = text[tag.end("block") if tag["block"] else tag.start() : boundary.start()]
        try:
            call = self._read_inside(attempt, is_inside=is_inside)
        except ValueError as error:
            attempts.add_malformed(str(error), start=tag.start(), end=end)
        else:
            attempts.add_call(call.name, call.arguments, start=tag.start(), end=end)
        return is_inside and closing is None

    def _read_inside(self, attempt: str, *, is_inside: bool) -> NamedCall:
        if not is_inside:
            raise ValueError("a call outside of a block of calls")
        return self.read(attempt.strip())
