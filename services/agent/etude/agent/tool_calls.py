"""Tool calls in a completion's text: parsing and rendering.

    CALL = <tool_call><function=NAME>(<parameter=P>text</parameter>)*</function></tool_call>

One newline after an opening tag, before a closing tag and between parameters is layout, not value.
A value may hold anything but <tool_call> and </tool_call>; it ends at the first </parameter> that
is followed by another parameter or by the end of the function. Every other use of these six tags
is a malformed call: it is kept as data, so that the policy can be shown what was wrong.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_TAG = re.compile(r"</?tool_call>|<function=|</function>|<parameter=|</parameter>")
_BOUNDARY = re.compile(r"</?tool_call>")
_FUNCTION = re.compile(r"<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"\n?<parameter=([^<>\s]+)>")
_VALUE_END = re.compile(r"</parameter>(?=\n?<parameter=|\Z)")
_SPACE = re.compile(r"[ \t\r\n]*+")
MAX_JSON_DEPTH = 100
"""Levels of lists and objects in an argument."""
_TOO_DEEP = f"nested more than {MAX_JSON_DEPTH} levels deep"
_OPEN, _CLOSE, _FUNCTION_CLOSE = "<tool_call>", "</tool_call>", "</function>"


class ToolCall(NamedTuple):
    """One call to an environment."""

    call_id: str
    """Unique in the rollout; a repeated id gets the stored result."""
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One well-formed call; the toolset checks that its tool exists."""

    name: str
    arguments: Mapping[str, object]
    """Text for each argument when it came from a completion, any JSON value from the wire."""
    raw: str = field(default="", compare=False)
    start: int = field(default=0, compare=False)
    """Position of raw in the parsed text."""
    call_id: str = field(default="", compare=False)
    """Id that the policy wrote, in formats that have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """An attempt at a call that does not parse."""

    reason: str
    """The error, in a few words for the policy."""
    raw: str = field(default="", compare=False)
    start: int = field(default=0, compare=False)


class ParsedCompletion(NamedTuple):
    """A completion's text, taken apart without loss: message plus each call's raw text."""

    calls: tuple[ParsedCall | MalformedCall, ...]
    message: str
    """The text outside of calls."""


def parse_calls(text: str) -> ParsedCompletion:
    """Split a completion's text into its calls and the message around them, in linear time."""
    calls: list[ParsedCall | MalformedCall] = []
    message: list[str] = []
    at = 0
    while tag := _TAG.search(text, at):
        start = tag.start()
        message.append(text[at:start])
        at = _end_of_attempt(text, start)
        calls.append(_read(text[start:at], start))
    message.append(text[at:])
    return ParsedCompletion(tuple(calls), "".join(message))


def cut_calls(text: str, calls: Sequence[ParsedCall]) -> str:
    """Cut the texts of calls out of a completion that has thinking before them."""
    for call in reversed(calls):  # thinking may hold the same texts
        before, _, after = text.rpartition(call.raw)
        text = before + after
    return text


def render_call(name: str, arguments: Mapping[str, str]) -> str:
    """The text that `parse` reads as this call; values must not hold <tool_call> tags."""
    parameters = "".join(
        f"<parameter={key}>{_guard_newlines(arguments[key])}</parameter>" for key in arguments
    )
    return f"<tool_call><function={name}>{parameters}</function></tool_call>"


def call_from_json(name: str, arguments_json: str) -> ParsedCall | MalformedCall:
    """Parse a call from the wire: a tool's name and one JSON object."""
    try:
        arguments = read_json(arguments_json)
    except ValueError as error:
        return MalformedCall(reason=f"the arguments are {error}", raw=arguments_json)
    if not isinstance(arguments, dict):
        return MalformedCall(reason="the arguments are not a JSON object", raw=arguments_json)
    return ParsedCall(name=name, arguments=arguments, raw=arguments_json)


def read_json(text: str) -> object:
    """Parse one JSON value.

    Raises:
        ValueError: as `decode_json`, or text follows the value.
    """
    value, end = decode_json(text, _SPACE.match(text).end())  # type: ignore[union-attr] # matches anywhere
    if _SPACE.match(text, end).end() < len(text):  # type: ignore[union-attr] # matches anywhere
        raise ValueError("not JSON: text follows the value")
    return value


def decode_json(text: str, start: int) -> "JsonValue":
    """Parse the JSON value that starts at a position.

    Raises:
        ValueError: there is none, or one that no other program could read: an infinite number, half
            of a surrogate pair, more than MAX_JSON_DEPTH levels.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    source = text[start:end]
    if source.count("[") + source.count("{") > MAX_JSON_DEPTH and _is_too_deep(value):
        raise ValueError(_TOO_DEEP)
    if "\\ud" in source.lower() and not _is_unicode(value):
        raise ValueError("not Unicode text")
    return JsonValue(value, end)


class JsonValue(NamedTuple):
    """A value and the position after it."""

    value: object
    end: int


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _read_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_read_number)


def _is_too_deep(value: object) -> bool:
    # Level by level: recursion would end where the caller's own depth says.
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return any(isinstance(child, dict | list) for child in level)


def _is_unicode(value: object) -> bool:
    # JSON can spell half of a surrogate pair, which is no character and cannot be written anywhere.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _guard_newlines(value: str) -> str:
    # A value's own newline at either end would be taken for layout.
    return f"\n{value}\n" if value.startswith("\n") or value.endswith("\n") else value


def _end_of_attempt(text: str, start: int) -> int:
    inside = start + len(_OPEN) if text.startswith(_OPEN, start) else start
    boundary = _BOUNDARY.search(text, inside)
    if boundary is None:
        return len(text)
    return boundary.end() if boundary[0] == _CLOSE else boundary.start()


def _read(raw: str, start: int) -> ParsedCall | MalformedCall:
    if not raw.startswith(_OPEN):
        return _malformed(raw, start, "a tag outside of <tool_call>")
    if not raw.endswith(_CLOSE):
        return _malformed(raw, start, "<tool_call> without </tool_call>")
    body = _trim_newlines(raw[len(_OPEN) : -len(_CLOSE)])
    function = _FUNCTION.match(body)
    if function is None or not body.endswith(_FUNCTION_CLOSE):
        return _malformed(raw, start, "<tool_call> must hold one <function=NAME>…</function>")
    arguments: dict[str, object] = {}
    wrong = _fill(arguments, _trim_newlines(body[function.end() : -len(_FUNCTION_CLOSE)]))
    if wrong:
        return _malformed(raw, start, wrong)
    return ParsedCall(name=function[1], arguments=arguments, raw=raw, start=start)


def _fill(arguments: dict[str, object], text: str) -> str:
    """Put the parameters of one function into the dict; a reason when they do not parse."""
    at = 0
    while at < len(text):
        opening = _PARAMETER.match(text, at)
        if opening is None:
            return "text between parameters"
        closing = _VALUE_END.search(text, opening.end())
        if closing is None:
            return f"<parameter={opening[1]}> without </parameter>"
        if opening[1] in arguments:
            return f"parameter {opening[1]} is given twice"
        arguments[opening[1]] = _trim_newlines(text[opening.end() : closing.start()])
        at = closing.end()
    return ""


def _trim_newlines(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _malformed(raw: str, start: int, reason: str) -> MalformedCall:
    return MalformedCall(reason=reason, raw=raw, start=start)
