"""Chat templates, rendered in the sandbox and with the functions that transformers gives them.

Source: `transformers.utils.chat_template_utils` of transformers 5 (docs: "Chat templates").
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import ext, nodes, parser, sandbox
from typing_extensions import override

from etude.agent.chat.folder import read_json, read_text, refuse_folder
from etude.agent.tool_messages import RenderedMessage
from etude.common.errors import EtudeError


class TemplateError(EtudeError):
    """A chat template refuses a conversation or fails at it."""

    reason = "ChatTemplate"


_DICT_NAMES = frozenset(dir(dict))
_MAX_KNOWN = 1024


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """Reads the fields of messages without an exception first, and checks each attribute once."""

    _is_safe: ClassVar[dict[tuple[type, str], bool]] = {}

    @override
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # The sandbox asks for the type of the object alone.
        known = self._is_safe.get((type(obj), attr))
        if known is None:
            known = super().is_safe_attribute(obj, attr, value)
            if len(self._is_safe) < _MAX_KNOWN:
                self._is_safe[type(obj), attr] = known
        return known

    @override
    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class _GenerationTag(ext.Extension):
    """`{% generation %}…{% endgeneration %}`: its content, as in transformers without a mask."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    @override
    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:  # noqa: ANN401 - a macro of jinja2
        return str(caller())


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One compiled template."""

    source: str
    path: Path
    """File that it comes from, for errors."""
    variables: Mapping[str, Any]
    """Special tokens by their names in tokenizer_config.json, as the template may use them."""
    _compiled: jinja2.Template = field(repr=False)

    @classmethod
    def compile(
        cls, source: str, *, path: Path, variables: Mapping[str, Any], now: datetime
    ) -> "ChatTemplate":
        """Compile a template.

        Args:
            source: Jinja.
            path: file that it comes from.
            variables: that it may use, messages apart.
            now: the time that `strftime_now` tells, for as long as the template lives: a prompt
                must not change at midnight.

        Raises:
            UserError: the template does not parse.
        """
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = now.strftime
        try:
            compiled = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            refuse_template(path, f"the chat template does not parse: {error}")
        return cls(source, path, variables, compiled)

    def render(
        self,
        messages: Sequence[RenderedMessage],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a conversation.

        Raises:
            TemplateError: the template refuses it, or fails.
        """
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except Exception as error:  # a template can raise whatever its expressions do
            raise TemplateError(f"{type(error).__name__}: {error}"[:500]) from error


def read_template(folder: Path, config: Mapping[str, Any]) -> tuple[str, Path] | None:
    """Read the source of a folder's chat template, and its file; None if there is none.

    A file chat_template.jinja is read before chat_template of tokenizer_config.json, as
    transformers does; of several named ones, "default".

    Raises:
        UserError: the template is no text.
    """
    path = folder / "chat_template.jinja"
    if (source := read_text(path)) is not None:
        return source, path
    path = folder / "tokenizer_config.json"
    found = config.get("chat_template")
    if found is None:
        path = folder / "chat_template.json"
        found = read_json(path).get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
        if found is None:
            names = ", ".join(sorted(map(str, named)))
            refuse_template(path, f"chat_template has no template named default, only: {names}")
    if found is None:
        return None
    if not isinstance(found, str):
        refuse_template(path, "chat_template is not text")
    return found, path


def refuse_template(path: Path, what: str) -> NoReturn:
    """Refuse a folder because of its chat template.

    Raises:
        UserError: always.
    """
    fix = "correct the template, or give a chat_template.jinja that transformers renders"
    refuse_folder(path, what, fix, "WrongChatTemplate")


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates give it by position too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
