"""Tokens of thinking in a completion, by the tags that the model's template or tokenizer has."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.agent.chat.format import ChatFormat
    from etude.agent.tool_formats.base import ToolFormat


def count_thinking(chat: "ChatFormat", ids: Sequence[int], *, is_open: bool) -> int:
    """Count the tokens of thinking, its tags included; thinking that is not closed counts, too.

    Args:
        chat: format of the model.
        ids: of the completion.
        is_open: True if the prompt leaves thinking open (`Conversation.opens_thinking`).
    """
    if chat.traits.thinking is None:
        return 0
    opened, closed = (chat.vocabulary.token_id(tag) for tag in chat.traits.thinking)
    if opened is None or closed is None:
        return _count_by_text(chat, ids, is_open=is_open)
    count = 0
    for token in ids:
        is_open = is_open or token == opened
        count += is_open
        is_open = is_open and token != closed
    return count


def remove_thinking(
    chat: "ChatFormat", text: str, tool_format: "ToolFormat", *, is_open: bool
) -> str:
    """Remove the thinking from a completion's text; thinking that is not closed goes to the end.

    From the first call on everything stays: its arguments may hold the same tags.

    Args:
        chat: format of the model.
        text: of the completion.
        tool_format: of the calls.
        is_open: True if the prompt leaves thinking open.
    """
    if chat.traits.thinking is None:
        return text
    opened, closed = chat.traits.thinking
    whole = opened + text if is_open else text
    kept, at = "", 0
    for thinking in re.finditer(
        rf"{re.escape(opened)}.*?(?:{re.escape(closed)}|\Z)", whole, flags=re.DOTALL
    ):
        before = whole[at : thinking.start()]
        if tool_format.parse(before).calls:
            break
        kept, at = kept + before, thinking.end()
    return kept + whole[at:]


def _count_by_text(chat: "ChatFormat", ids: Sequence[int], *, is_open: bool) -> int:
    """Count where the tags are several tokens each: the first thinking of the completion."""
    assert chat.traits.thinking is not None  # noqa: S101 - the caller has tags
    opened, closed = chat.traits.thinking
    text = chat.decode(ids)
    start = 0 if is_open else text.find(opened)
    if start < 0:
        return 0
    end = text.find(closed, start)
    first = _count_tokens(chat, ids, start) if start else 0
    last = len(ids) if end < 0 else _count_tokens(chat, ids, end + len(closed))
    return last - first


def _count_tokens(chat: "ChatFormat", ids: Sequence[int], size: int) -> int:
    """Number of tokens whose text reaches a length."""
    return bisect_left(range(len(ids)), size, key=lambda count: len(chat.decode(ids[:count])))
