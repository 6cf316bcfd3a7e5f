"""Calls as JSON objects between tags, as Hermes, Qwen 2.5 and Qwen 3 write them.

<tool_call>
{"name": NAME, "arguments": {KEY: VALUE}}
</tool_call>

A newline directly before <tool_call> is layout.
Source: the chat templates of Hermes 2 Pro and Qwen3.
"""

import re
from collections.abc import Collection, Sequence

from typing_extensions import override

from etude.agent.tool_calls import ParsedCall, ParsedCompletion
from etude.agent.tool_formats.base import Attempts, ToolFormat, check_rendering
from etude.agent.tool_formats.json_calls import JSON_BODY, find_body, read_call, write_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG = re.compile(r"\n?<tool_call>|</tool_call>")


def is_hermes(template: str, added_tokens: Collection[str]) -> bool:
    """True for a template that shows <tool_call>, and no parameters as tags in it."""
    del added_tokens
    return OPEN in template and "<function=" not in template and "<arg_key>" not in template


def end_of_attempt(text: str, start: int) -> int:
    """Position after the next </tool_call>, or before an earlier <tool_call>, or the text's end."""
    boundary = TAG.search(text, start)
    if boundary is None:
        return len(text)
    return boundary.end() if boundary[0] == CLOSE else boundary.start()


class HermesFormat(ToolFormat):
    """One JSON object in each pair of tags."""

    name = "hermes"

    @override
    def parse(self, text: str) -> ParsedCompletion:
        attempts = Attempts(text)
        while tag := TAG.search(text, attempts.end):
            _read(text, tag, attempts)
        return attempts.finish()

    @override
    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        texts = [_write(call) for call in calls]
        text = "\n".join([message, *texts] if message else texts)
        return check_rendering(self, text, calls, message)


def _read(text: str, tag: re.Match[str], attempts: Attempts) -> None:
    if tag[0] == CLOSE:
        attempts.add_malformed(f"{CLOSE} without {OPEN}", start=tag.start(), end=tag.end())
        return
    end = _end_of_call(text, tag.end())
    inside = text[tag.end() : end].removesuffix(CLOSE)
    if not text.endswith(CLOSE, tag.end(), end):
        attempts.add_malformed(f"{OPEN} without {CLOSE}", start=tag.start(), end=end)
        return
    try:
        call = read_call(inside, "arguments")
    except ValueError as error:
        attempts.add_malformed(f"in {OPEN}: {error}", start=tag.start(), end=end)
        return
    attempts.add_call(call.name, call.arguments, start=tag.start(), end=end)


def _end_of_call(text: str, start: int) -> int:
    body = find_body(JSON_BODY, text, start)
    if body.is_open:
        return len(text)
    if CLOSE.startswith(text[body.end : body.end + len(CLOSE)]):
        return min(body.end + len(CLOSE), len(text))
    return end_of_attempt(text, body.end)


def _write(call: ParsedCall) -> str:
    written = f'{{"name": {write_json(call.name)}, "arguments": {write_json(call.arguments)}}}'
    return f"{OPEN}\n{written}\n{CLOSE}"
