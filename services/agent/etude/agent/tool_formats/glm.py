"""Calls as pairs of keys and values, as GLM 4.5 and later write them.

<tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>VALUE</arg_value>
</tool_call>

Newlines between tags, and one directly before <tool_call>, are layout; GLM 4.7 writes none. Every
value is text; the tool's schema says what it means. A value ends at the first </arg_value> that is
followed by another key or by the end of the call, and holds neither of the tool_call tags.
Source: the chat templates of GLM-4.5 and GLM-4.7.
"""

import re
from collections.abc import Collection, Sequence

from typing_extensions import override

from etude.agent.tool_calls import ParsedCall, ParsedCompletion
from etude.agent.tool_formats.base import Attempts, ToolFormat, check_rendering
from etude.agent.tool_formats.hermes import CLOSE, OPEN, TAG, end_of_attempt
from etude.agent.tool_formats.json_calls import NamedCall
from etude.agent.tool_formats.xml import as_texts

_NAME = re.compile(r"\s*([^<>\s]+)\s*(?=<arg_key>|\Z)")
_KEY = re.compile(r"\s*<arg_key>([^<>\s]+)</arg_key>\s*<arg_value>")
_VALUE_END = re.compile(r"</arg_value>(?=\s*<arg_key>|\s*\Z)")


def is_glm(template: str, added_tokens: Collection[str]) -> bool:
    """True for a template that shows <arg_key>."""
    del added_tokens
    return "<arg_key>" in template


class GlmFormat(ToolFormat):
    """A name, and tags for each key and value."""

    name = "glm"

    @override
    def parse(self, text: str) -> ParsedCompletion:
        attempts = Attempts(text)
        while tag := TAG.search(text, attempts.end):
            if tag[0] == CLOSE:
                attempts.add_malformed(f"{CLOSE} without {OPEN}", start=tag.start(), end=tag.end())
                continue
            end = end_of_attempt(text, tag.end())
            try:
                call = _read_call(text[tag.end() : end])
            except ValueError as error:
                attempts.add_malformed(str(error), start=tag.start(), end=end)
            else:
                attempts.add_call(call.name, call.arguments, start=tag.start(), end=end)
        return attempts.finish()

    @override
    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        written = [as_texts(call) for call in calls]
        texts = [
            f"\n{OPEN}{call.name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
                for key, value in call.arguments.items()
            )
            + CLOSE
            for call in written
        ]
        return check_rendering(self, message + "".join(texts), written, message)


def _read_call(attempt: str) -> NamedCall:
    if not attempt.endswith(CLOSE):
        raise ValueError(f"{OPEN} without {CLOSE}")
    body = attempt.removesuffix(CLOSE)
    name = _NAME.match(body)
    if name is None:
        raise ValueError(
            f"{OPEN} must hold a name, then <arg_key> and <arg_value> for each argument"
        )
    arguments: dict[str, object] = {}
    at = name.end()
    while key := _KEY.match(body, at):
        value_end = _VALUE_END.search(body, key.end())
        if value_end is None:
            raise ValueError(f"<arg_value> of {key[1]} without </arg_value>")
        if key[1] in arguments:
            raise ValueError(f"argument {key[1]} is given twice")
        arguments[key[1]] = body[key.end() : value_end.start()]
        at = value_end.end()
    if body[at:].strip():
        raise ValueError("text between arguments")
    return NamedCall(name[1], arguments)
