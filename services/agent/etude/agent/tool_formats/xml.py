"""Calls as tags: the harness's own format, which Qwen3-Coder and Qwen 3.5 and later write, too.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

Every value is text; the tool's schema says what it means.
Source: the chat template of Qwen3-Coder.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from typing_extensions import override

from etude.agent.tool_calls import ParsedCall, ParsedCompletion, parse_calls, render_call
from etude.agent.tool_formats.base import ToolFormat, check_rendering
from etude.agent.tool_formats.json_calls import write_json


def is_xml(template: str, added_tokens: Collection[str]) -> bool:
    """True for a template that shows <function=…> inside of <tool_call>."""
    del added_tokens
    return "<tool_call>" in template and "<function=" in template


def as_texts(call: ParsedCall) -> ParsedCall:
    """The call with its values as a format without types writes them."""
    texts = {
        key: value if isinstance(value, str) else write_json(value)
        for key, value in call.arguments.items()
    }
    return replace(call, arguments=texts)


class XmlFormat(ToolFormat):
    """Tags for the function and each parameter."""

    name = "xml"

    @override
    def parse(self, text: str) -> ParsedCompletion:
        return parse_calls(text)

    @override
    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        written = [as_texts(call) for call in calls]
        texts = [render_call(call.name, {**call.arguments}) for call in written]  # type: ignore[dict-item] # as_texts
        return check_rendering(self, message + "".join(texts), written, message)
