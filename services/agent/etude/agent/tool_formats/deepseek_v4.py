"""Calls as tags with types, as DeepSeek V3.2 and V4 write them.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="NAME">
<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>

string="true" says that the value is text as it stands, string="false" that it is JSON. Newlines
between tags, and an empty line directly before the block, are layout. A value ends at the first
closing tag that is followed by another parameter or by the end of the call, and holds no tag of
calls or blocks. V3.2 calls the block function_calls, which is read, too.
Source: the encoding that DeepSeek-V4 is published with.
"""

import re
from collections.abc import Collection, Sequence

from typing_extensions import override

from etude.agent.tool_calls import ParsedCall, ParsedCompletion, read_json
from etude.agent.tool_formats.base import ToolFormat, check_rendering
from etude.agent.tool_formats.blocks import BlockGrammar
from etude.agent.tool_formats.json_calls import NamedCall, write_json

MARK = "｜DSML｜"
_BLOCKS = "(?:tool_calls|function_calls)"
_CALL = re.compile(rf'\s*+<{MARK}invoke name="([^"<>]++)">')
_PARAMETER = re.compile(rf'\s*+<{MARK}parameter name="([^"<>]++)" string="(true|false)">')
_VALUE_END = re.compile(rf"</{MARK}parameter>(?=\s*+(?:<{MARK}parameter |\Z))")


def is_deepseek_v4(template: str, added_tokens: Collection[str]) -> bool:
    """True for a template that shows <｜DSML｜invoke>."""
    del added_tokens
    return f"<{MARK}invoke" in template


def _read_call(attempt: str) -> NamedCall:
    call = _CALL.match(attempt)
    if call is None:
        raise ValueError(f'a call begins with <{MARK}invoke name="NAME">')
    arguments: dict[str, object] = {}
    at = call.end()
    while parameter := _PARAMETER.match(attempt, at):
        key, is_text = parameter[1], parameter[2] == "true"
        value_end = _VALUE_END.search(attempt, parameter.end())
        if value_end is None:
            raise ValueError(f"parameter {key} without </{MARK}parameter>")
        if key in arguments:
            raise ValueError(f"parameter {key} is given twice")
        value = attempt[parameter.end() : value_end.start()]
        arguments[key] = value if is_text else _read_value(key, value)
        at = value_end.end()
    if attempt[at:].strip():
        raise ValueError("text between parameters")
    return NamedCall(call[1], arguments)


def _read_value(key: str, value: str) -> object:
    try:
        return read_json(value)
    except ValueError as error:
        raise ValueError(f'parameter {key}, string="false", is {error}') from error


_GRAMMAR = BlockGrammar(
    block=rf"(?:\n\n)?<{MARK}{_BLOCKS}>",
    block_end=rf"</{MARK}{_BLOCKS}>",
    call=rf"\n?<{MARK}invoke(?=[ >])",
    call_end=f"</{MARK}invoke>",
    other=rf"</?{MARK}",
    body=re.compile(""),
    read=_read_call,
)


class DeepSeekV4Format(ToolFormat):
    """Tags for the call and each parameter, which say what is text."""

    name = "deepseek_v4"

    @override
    def parse(self, text: str) -> ParsedCompletion:
        return _GRAMMAR.parse(text)

    @override
    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        body = "".join(_write(call) for call in calls)
        block = f"\n\n<{MARK}tool_calls>\n{body}</{MARK}tool_calls>"
        return check_rendering(self, message + (block if calls else ""), calls, message)


def _write(call: ParsedCall) -> str:
    parameters = "".join(
        f'<{MARK}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else write_json(value)}</{MARK}parameter>\n"
        for key, value in call.arguments.items()
    )
    return f'<{MARK}invoke name="{call.name}">\n{parameters}</{MARK}invoke>\n'
