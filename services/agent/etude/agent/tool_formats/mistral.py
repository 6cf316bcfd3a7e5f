"""Calls after a control token, as Mistral's models write them.

[TOOL_CALLS]NAME[ARGS]{KEY: VALUE}                 since version 11 of the format, each call so
[TOOL_CALLS][{"name": NAME, "arguments": {KEY: VALUE}, "id": ID}]           before, one list

[CALL_ID] and an id may stand before [ARGS]. Either form is read, whichever the template shows.
Source: mistral-common.
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from typing_extensions import override

from etude.agent.tool_calls import ParsedCall, ParsedCompletion, decode_json
from etude.agent.tool_formats.base import Attempts, ToolFormat, check_rendering
from etude.agent.tool_formats.json_calls import (
    JSON_STRING,
    NamedCall,
    arguments_of,
    call_of,
    find_body,
    write_json,
)

TAG = "[TOOL_CALLS]"
_BODY = re.compile(rf'(?:[^"\\\[]|\[(?!TOOL_CALLS\])|{JSON_STRING})*+', re.DOTALL)
"""JSON_BODY for this tag."""
_HEAD = re.compile(
    r"\s*+([^\s\[\]{}\"]++)\s*+(?:\[CALL_ID\]([^\s\[\]{}\"]*+))?(?:\[ARGS\])\s*+(?=\{)"
)
_LIST = re.compile(r"\s*+\[\s*+")
_SEPARATOR = re.compile(r"\s*+(,|\])\s*+")


def is_mistral(template: str, added_tokens: Collection[str]) -> bool:
    """True for a template that shows [TOOL_CALLS] and [ARGS]."""
    del added_tokens
    return TAG in template and "[ARGS]" in template


def is_mistral_list(template: str, added_tokens: Collection[str]) -> bool:
    """True for a template that shows [TOOL_CALLS] without [ARGS]."""
    del added_tokens
    return TAG in template and "[ARGS]" not in template


class MistralFormat(ToolFormat):
    """A name and a JSON object after each control token."""

    name = "mistral"

    @override
    def parse(self, text: str) -> ParsedCompletion:
        attempts = Attempts(text)
        while (tag := text.find(TAG, attempts.end)) >= 0:
            _read(text, tag, attempts)
        return attempts.finish()

    @override
    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        texts = [f"{TAG}{call.name}[ARGS]{write_json(call.arguments)}" for call in calls]
        return check_rendering(self, message + "".join(texts), calls, message)


class MistralListFormat(MistralFormat):
    """One JSON list of all calls after one control token."""

    name = "mistral_list"

    @override
    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        written = [{"name": call.name, "arguments": call.arguments} for call in calls]
        text = message + (TAG + write_json(written) if calls else "")
        return check_rendering(self, text, calls, message)


class _Element(NamedTuple):
    """A call of a list, and the position after it and its separator."""

    call: NamedCall
    end: int


def _read(text: str, tag: int, attempts: Attempts) -> None:
    inside = tag + len(TAG)
    head = _HEAD.match(text, inside)
    first = inside if head is None else head.end()
    body = find_body(_BODY, text, first)
    written = text[first : body.end]
    try:
        if head is None:
            elements = _read_list(written)
        else:
            value, end = decode_json(written, 0)
            elements = [_Element(NamedCall(head[1], arguments_of(value), head[2] or ""), end)]
    except ValueError as error:
        boundary = -1 if body.is_open else text.find(TAG, body.end)
        end = len(text) if boundary < 0 else boundary
        attempts.add_malformed(f"after {TAG}: {error}", start=tag, end=end)
        return
    start = tag
    for call, end in elements:
        attempts.add_call(
            call.name, call.arguments, start=start, end=first + end, call_id=call.call_id
        )
        start = first + end


def _read_list(written: str) -> list[_Element]:
    """The calls of one whole list.

    Raises:
        ValueError: there is no list, or an object of it is no call.
    """
    opening = _LIST.match(written)
    if opening is None:
        raise ValueError("neither a name, [ARGS] and a JSON object, nor a JSON list")
    elements: list[_Element] = []
    at, is_open = opening.end(), True
    while is_open:
        value, end = decode_json(written, at)
        separator = _SEPARATOR.match(written, end)
        if separator is None:
            raise ValueError("the list of calls is not closed")
        at, is_open = separator.end(), separator[1] == ","
        # Space after the list belongs to the message.
        elements.append(_Element(call_of(value, "arguments"), at if is_open else separator.end(1)))
    return elements
