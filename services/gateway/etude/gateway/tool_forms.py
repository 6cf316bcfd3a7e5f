"""Form of a client's tools for the policy: shown by its template, or described in the prompt."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.chat.native_form import find_native_form
from etude.agent.tool_calls import ParsedCall, ParsedCompletion, read_json
from etude.agent.tool_formats.base import ToolFormat
from etude.agent.tool_formats.xml import XmlFormat
from etude.agent.tool_messages import ShownTools
from etude.agent.toolsets import CALL_FORM
from etude.common.errors import InvalidFieldError, UserError
from etude.gateway.turn_request import Schema, ToolFormatName

MAX_FORMS = 256
"""Sets of tools whose form is remembered."""


class TextFormat(ToolFormat):
    """No calls at all: every completion is a message."""

    name = "text"

    @override
    def parse(self, text: str) -> ParsedCompletion:
        return ParsedCompletion((), text)

    @override
    def render(self, calls: Sequence[ParsedCall], message: str = "") -> str:
        if calls:
            raise ValueError("there is no tool")
        return message


@dataclass(frozen=True, slots=True)
class ToolForm:
    """One set of tools, as the policy sees and calls them."""

    tool_format: ToolFormat
    shown: ShownTools | None = None
    """Tools for the chat template; None if the guide describes them."""
    guide: str = ""
    """Description of the tools for the system prompt."""
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    """Parameters of each tool, by its name; none for a harness, which reads arguments itself."""
    names_malformed: bool = False
    """True for a harness: calls that do not parse are listed in their places, without a name."""

    def read_arguments(self, call: ParsedCall) -> Mapping[str, object]:
        """Arguments of a call as JSON values: a format without types writes them all as text."""
        properties = self.schemas.get(call.name, {}).get("properties")
        if not isinstance(properties, Mapping):
            return call.arguments
        return {
            key: _read_value(value, properties.get(key)) for key, value in call.arguments.items()
        }


NO_TOOLS = ToolForm(TextFormat())


@dataclass(slots=True)
class ToolForms:
    """Forms of the sets of tools that clients gave last."""

    chat: ChatFormat
    _forms: "OrderedDict[str, ToolForm]" = field(default_factory=OrderedDict)

    def find(self, tools: Sequence[Schema], tool_format: ToolFormatName = "") -> ToolForm:
        """Find the form of a set of tools; unless one is named, the model's own where it has one.

        Raises:
            InvalidFieldError: a tool has no name, or the model has no form of its own.
        """
        if not tools:
            return NO_TOOLS
        key = json.dumps([tool_format, tools])
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = (
                _find_harness_form(self.chat, tools, tool_format)
                if tool_format
                else _find_form(self.chat, tools)
            )
            if len(self._forms) > MAX_FORMS:
                self._forms.popitem(last=False)
        self._forms.move_to_end(key)
        return form


def _find_harness_form(
    chat: ChatFormat, tools: Sequence[Schema], tool_format: ToolFormatName
) -> ToolForm:
    """Form of a harness's tools, as in the rollouts that trained the policy.

    Raises:
        InvalidFieldError: it is Native, and the model has no form of its own.
    """
    if tool_format == "Xml":
        # Its system prompt describes the tools.
        return ToolForm(XmlFormat(), names_malformed=True)
    try:
        native = find_native_form(chat, tools)
    except UserError as error:
        raise InvalidFieldError("x-etude-tool-format", error.problem.what) from error
    return ToolForm(native.tool_format, native.shown, names_malformed=True)


def _find_form(chat: ChatFormat, tools: Sequence[Schema]) -> ToolForm:
    schemas: dict[str, Schema] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidFieldError(f"tools[{index}]", "is no function with a name")
        parameters = function.get("parameters")
        schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    try:
        native = find_native_form(chat, tools)
    except UserError:
        rows = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        return ToolForm(XmlFormat(), None, "\n".join([CALL_FORM, "", "Tools:", *rows]), schemas)
    return ToolForm(native.tool_format, native.shown, "", schemas)


def _read_value(value: object, schema: object) -> object:
    """Read one argument's text as the type of its schema; text that has another stays text."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if not isinstance(value, str) or kind in {None, "string"}:
        return value
    try:
        return read_json(value)
    except ValueError:
        return value
