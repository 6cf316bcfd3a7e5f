"""Calls as JSON objects alone, as Llama 3.1 and later write them.

{"name": NAME, "parameters": {KEY: VALUE}}

Objects may be preceded by <|python_tag|>, and several are separated by semicolons. A completion is
calls only if it begins with such an object: without the tag, JSON inside of prose is prose. Python
code and calls of built-in tools after the tag are malformed calls.
Source: the chat template of Llama 3.1 and the prompt format page of llama-models.
"""

import re
from collections.abc import Collection, Sequence

from typing_extensions import override

from etude.agent.tool_calls import ParsedCall, ParsedCompletion, decode_json
from etude.agent.tool_formats.base import Attempts, ToolFormat, check_rendering
from etude.agent.tool_formats.json_calls import JSON_BODY, call_of, find_body, write_json

TAG = "<|python_tag|>"
_LEADING_CALL = re.compile(r'\s*+\{\s*+"(?:name"|type"\s*+:\s*+"function")')
_SEPARATOR = re.compile(r"\s*+(?:;\s*+)?(?=\{)")
_SPACE = re.compile(r"\s*+")


def is_llama3(template: str, added_tokens: Collection[str]) -> bool:
    """True for a template that shows "parameters" of a call, with a tokenizer that has the tag."""
    return '"parameters"' in template and (TAG in added_tokens or TAG in template)


class Llama3Format(ToolFormat):
    """One JSON object for each call, without tags around it."""

    name = "llama3"

    @override
    def parse(self, text: str) -> ParsedCompletion:
        attempts = Attempts(text)
        if _LEADING_CALL.match(text):
            _read_sequence(text, 0, 0, attempts)
        while (tag := text.find(TAG, attempts.end)) >= 0:
            _read_sequence(text, tag, tag + len(TAG), attempts)
        return attempts.finish()

    @override
    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        texts = [
            f'{{"name": {write_json(call.name)}, "parameters": {write_json(call.arguments)}}}'
            for call in calls
        ]
        text = message + (TAG if message and calls else "") + "; ".join(texts)
        return check_rendering(self, text, calls, message)


def _read_sequence(text: str, start: int, first: int, attempts: Attempts) -> None:
    """Read the calls from one position on; the first attempt's text begins at `start`."""
    body = find_body(JSON_BODY, text, first)
    # Cut once, so that an error looks no further than the next tag.
    objects = text[first : body.end]
    at = _end_of_match(_SPACE, objects, 0)
    try:
        while at < len(objects):
            value, end = decode_json(objects, at)
            call = call_of(value, "parameters", "arguments")
            attempts.add_call(call.name, call.arguments, start=start, end=first + end)
            start = first + end
            separator = _SEPARATOR.match(objects, end)
            if separator is None:
                return
            at = separator.end()
        reason = f"{TAG} without a call"
    except ValueError as error:
        reason = f"a call is a JSON object: {error}"
    boundary = -1 if body.is_open else text.find(TAG, body.end)
    attempts.add_malformed(reason, start=start, end=len(text) if boundary < 0 else boundary)


def _end_of_match(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return start if found is None else found.end()
