"""Messages with tool calls and results, in the form that chat templates read.

Source: the messages of `apply_chat_template` in transformers (docs: "Tool use").
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from etude.agent.tool_calls import ParsedCall
from etude.agent.tool_formats.base import ToolFormat
from etude.agent.tool_formats.json_calls import write_json

RenderedMessage = Mapping[str, Any]
"""One message as templates read it: role, content, and further fields of some roles."""

_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Mistral's templates refuse any other id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTools:
    """Tools that a chat template shows, and the form in which it takes calls."""

    schemas: Sequence[Mapping[str, object]]
    """JSON schema of each tool's function."""
    has_text_arguments: bool = False
    """True if the template takes a call's arguments as JSON text, not as an object."""

    def names(self) -> list[str]:
        """Names of the tools."""
        functions: list[Any] = [schema["function"] for schema in self.schemas]
        return [function["name"] for function in functions]


class NativeForm(NamedTuple):
    """The form of tools that a model was taught."""

    tool_format: ToolFormat
    """Of its calls."""
    shown: ShownTools
    """To its chat template."""


def make_call_message(
    shown: ShownTools, content: str, calls: Sequence[ParsedCall], *, first: int
) -> RenderedMessage:
    """Make an assistant's message with calls.

    Args:
        shown: form of the calls.
        content: text of the turn without its calls.
        calls: of the turn.
        first: number of the first call in the conversation, which makes its id.
    """
    written = [
        {
            "id": choose_call_id(call, first + index),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": write_json(call.arguments)
                if shown.has_text_arguments
                else call.arguments,
            },
        }
        for index, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": written}


def make_result_messages(turn: RenderedMessage, results: Sequence[str]) -> list[RenderedMessage]:
    """Make a message for each result of a turn's calls."""
    return [
        {
            "role": "tool",
            "name": call["function"]["name"],
            "tool_call_id": call["id"],
            "content": result,
        }
        for call, result in zip(turn["tool_calls"], results, strict=True)
    ]


def name_last_call(turn: RenderedMessage, name: str) -> RenderedMessage:
    """A turn whose last call has another name and no arguments."""
    *calls, last = turn["tool_calls"]
    arguments: Any = "{}" if isinstance(last["function"]["arguments"], str) else {}
    renamed = {**last, "function": {"name": name, "arguments": arguments}}
    return {**turn, "tool_calls": [*calls, renamed]}


def choose_call_id(call: ParsedCall, number: int) -> str:
    """Choose the id of a conversation's call by its number: the policy's own if it wrote one."""
    # A model that writes ids is shown its own beside the result.
    return call.call_id if _CALL_ID.fullmatch(call.call_id) else f"call{number:05d}"
