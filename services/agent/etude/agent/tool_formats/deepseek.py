"""Calls as JSON objects between control tokens, as DeepSeek V3, R1 and V3.1 write them.

<｜tool▁calls▁begin｜>
<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{KEY: VALUE}<｜tool▁call▁end｜>…              V3.1
<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
{KEY: VALUE}
```<｜tool▁call▁end｜>…                                                             V3 and R1
<｜tool▁calls▁end｜>

Either form is read, whichever the template shows; there is no layout around the tokens in V3.1,
and a newline between calls in V3.
Source: the chat templates of DeepSeek-V3, DeepSeek-R1 and DeepSeek-V3.1.
"""

import re
from collections.abc import Collection, Sequence

from typing_extensions import override

from etude.agent.tool_calls import ParsedCall, ParsedCompletion, read_json
from etude.agent.tool_formats.base import ToolFormat, check_rendering
from etude.agent.tool_formats.blocks import BlockGrammar
from etude.agent.tool_formats.json_calls import (
    JSON_STRING,
    NamedCall,
    arguments_of,
    write_json,
)

BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCED = re.compile(
    rf"{CALL}\s*+function{SEPARATOR}\s*+([^\s<`]++)\s*+```json\s*+(\{{.*\}})\s*+```\s*+", re.DOTALL
)
_PLAIN = re.compile(rf"{CALL}\s*+([^\s<]++)\s*+{SEPARATOR}\s*+(\{{.*\}})\s*+", re.DOTALL)
_BODY = re.compile(rf'(?:{SEPARATOR}|[^"<\\]|{JSON_STRING})*+', re.DOTALL)
"""JSON_BODY with the name before it and its fence."""


def is_deepseek(template: str, added_tokens: Collection[str]) -> bool:
    """True for a template that shows <｜tool▁call▁begin｜> and no ```json."""
    del added_tokens
    return CALL in template and "```json" not in template


def is_deepseek_fenced(template: str, added_tokens: Collection[str]) -> bool:
    """True for a template that shows <｜tool▁call▁begin｜> and ```json."""
    del added_tokens
    return CALL in template and "```json" in template


def _read_call(attempt: str) -> NamedCall:
    call = _FENCED.fullmatch(attempt) or _PLAIN.fullmatch(attempt)
    if call is None:
        raise ValueError(f"{CALL} must hold a name, {SEPARATOR} and a JSON object")
    return NamedCall(call[1], arguments_of(read_json(call[2])))


_GRAMMAR = BlockGrammar(
    block=BLOCK,
    block_end=BLOCK_END,
    call=rf"\n?{CALL}",
    call_end=CALL_END,
    other=SEPARATOR,
    body=_BODY,
    read=_read_call,
)


class DeepSeekFormat(ToolFormat):
    """A name and a JSON object between control tokens."""

    name = "deepseek"

    @override
    def parse(self, text: str) -> ParsedCompletion:
        return _GRAMMAR.parse(text)

    @override
    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        body = self._join([self._write(call) for call in calls])
        text = message + (BLOCK + body + BLOCK_END if calls else "")
        return check_rendering(self, text, calls, message)

    def _write(self, call: ParsedCall) -> str:
        return f"{CALL}{call.name}{SEPARATOR}{write_json(call.arguments)}{CALL_END}"

    def _join(self, texts: Sequence[str]) -> str:
        return "".join(texts)


class DeepSeekFencedFormat(DeepSeekFormat):
    """A name and a JSON object in a fence of Markdown."""

    name = "deepseek_fenced"

    @override
    def _write(self, call: ParsedCall) -> str:
        arguments = write_json(call.arguments)
        return f"{CALL}function{SEPARATOR}{call.name}\n```json\n{arguments}\n```{CALL_END}"

    @override
    def _join(self, texts: Sequence[str]) -> str:
        return "\n".join(texts)
