"""Calls written as JSON objects: the end of an object, and its name and arguments."""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from etude.agent.tool_calls import read_json

JSON_STRING = r'"(?:[^"\\]|\\.)*+"(?=\s*+(?:[,:}\]]|\Z))'
"""A string that is followed by what may follow one in JSON: a lost quote is noticed at the next."""
JSON_BODY = re.compile(rf'(?:[^"<\\]|{JSON_STRING})*+', re.DOTALL)
r"""Matches to the first < or \ outside of strings, neither of which JSON has there.

A tag inside of a string is passed over, so a value may hold the format's own tags.
"""
_OPEN_STRING = re.compile(r'"(?:[^"\\]|\\.)*+\\?\Z', re.DOTALL)


class Body(NamedTuple):
    """A stretch of text that may be the inside of a call."""

    end: int
    """Position of the first character that is not in it."""
    is_open: bool
    """The text ends inside of it: nothing after the start of the call can be read."""


def find_body(pattern: re.Pattern[str], text: str, start: int) -> Body:
    """Match JSON_BODY, or a pattern like it, at a position."""
    match = pattern.match(text, start)
    end = start if match is None else match.end()
    return Body(end, end == len(text) or _OPEN_STRING.match(text, end) is not None)


class NamedCall(NamedTuple):
    """A tool's name, its arguments, and the id that the policy gave it."""

    name: str
    arguments: Mapping[str, object]
    call_id: str = ""


def read_call(text: str, *keys: str) -> NamedCall:
    """Parse one JSON object that has a name, and arguments under one of the keys.

    Raises:
        ValueError: it is no such object; the text of the error is for the policy.
    """
    return call_of(read_json(text), *keys)


def call_of(value: object, *keys: str) -> NamedCall:
    """The call that a JSON value says.

    Raises:
        ValueError: it says none.
    """
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - the value comes from a text
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('the object needs a "name"')
    for key in keys:
        if key in value:
            given = value.get("id")
            return NamedCall(
                name, arguments_of(value[key]), given if isinstance(given, str) else ""
            )
    raise ValueError(f'the object needs "{keys[0]}"')


def arguments_of(value: object) -> Mapping[str, object]:
    """Arguments by name.

    Raises:
        ValueError: the value is not a JSON object.
    """
    if not isinstance(value, dict):
        raise ValueError("the arguments are not a JSON object")  # noqa: TRY004 - as above
    return value


def write_json(value: object) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
