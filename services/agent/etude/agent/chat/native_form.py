"""Native form of tools: shown by a model's own chat template, called as the model was taught."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from etude.agent.chat.template import TemplateError
from etude.agent.chat.thinking import remove_thinking
from etude.agent.chat.traits import INSTRUCTION, RESULT, SYSTEM
from etude.agent.tool_calls import ParsedCall
from etude.agent.tool_formats.base import ToolFormat
from etude.agent.tool_formats.registry import find_tool_format
from etude.agent.tool_messages import NativeForm, ShownTools
from etude.common.errors import Problem, UserError

if TYPE_CHECKING:
    from etude.agent.chat.format import ChatFormat

FIELD = "rollout.toolFormat"


def find_native_form(chat: "ChatFormat", schemas: Sequence[Mapping[str, object]]) -> NativeForm:
    """Find the form in which a model's own chat template shows tools and writes calls.

    A turn with a call is tried: the template must show the tools, and write a call that the form's
    parser reads as the same call.

    Args:
        chat: of the model.
        schemas: JSON schema of each tool's function.

    Raises:
        UserError: the template does not; the field that asks for it is named.
    """
    tool_format = find_tool_format(chat.template.source, chat.vocabulary.tags)
    if tool_format is None:
        _refuse(chat, "shows no form of tool calls that is known")
    forms = [ShownTools(schemas=schemas, has_text_arguments=has_text) for has_text in (False, True)]
    problems = [_try_turn(chat, tool_format, shown) for shown in forms]
    if all(problems):
        _refuse(chat, problems[0])
    return NativeForm(tool_format, forms[problems.index("")])


def _try_turn(chat: "ChatFormat", tool_format: ToolFormat, shown: ShownTools) -> str:
    """Reason why a template cannot be used with tools; empty if it can."""
    names = shown.names()
    call = ParsedCall(name=names[0], arguments={"path": "a b.py"})
    try:
        bare = chat.decode(chat.open(SYSTEM, INSTRUCTION).prompt)
        conversation = chat.open(SYSTEM, INSTRUCTION, shown)
        is_open = conversation.opens_thinking
        conversation.add_completion(tool_format.render([call]), calls=[call])
        delta = conversation.append_results([RESULT])
        again = conversation.render_again()
    except (TemplateError, ValueError) as error:
        return f"fails with tools: {error}"
    opening = chat.decode(conversation.prompt)
    missing = [name for name in names if opening.count(name) <= bare.count(name)]
    if missing:
        return f"does not show the tools that it is given: {', '.join(missing)}"
    if conversation.num_text_turns or RESULT not in chat.decode(delta):
        return "does not render calls and their results"
    # Some templates write no thinking in earlier turns, where it is not open then.
    is_open = is_open and again[: len(conversation.prompt)] == conversation.prompt
    turn = _turn_between(chat, conversation.prompt, again, delta)
    text = remove_thinking(chat, turn, tool_format, is_open=is_open)
    if tool_format.parse(text).calls != (call,):
        return f"writes a call as {turn[:200]!r}, which is not the form {tool_format.name}"
    return ""


def _turn_between(
    chat: "ChatFormat", prompt: Sequence[int], whole: Sequence[int], delta: Sequence[int]
) -> str:
    """Text of the turn that a rendering has between a prompt and a delta, without its end."""
    pairs = zip(prompt, whole, strict=False)
    start = next((place for place, (one, other) in enumerate(pairs) if one != other), len(prompt))
    ids = list(whole[start : len(whole) - len(delta)])
    while ids and ids[-1] in chat.end_ids:
        ids.pop()
    return chat.decode(ids)


def _refuse(chat: "ChatFormat", what: str) -> NoReturn:
    raise UserError(
        Problem(
            reason="WrongChatTemplate",
            what=f"is Native, and the model's chat template ({chat.template.path}) {what}",
            where=FIELD,
            fix="set rollout.toolFormat: Xml, which any model can be told, or give a model with a"
            " template for tools",
        )
    )
