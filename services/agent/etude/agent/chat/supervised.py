"""Transcripts for supervised training: the template's tokens, and which of them were written."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from etude.agent.chat.template import RenderedMessage, TemplateError

if TYPE_CHECKING:
    from etude.agent.chat.format import ChatFormat


class SupervisedTokens(NamedTuple):
    """A finished transcript with its authorship."""

    token_ids: list[int]
    written: list[bool]
    """True where the assistant wrote the token, the end of its turn included."""


def encode_transcript(
    chat: "ChatFormat",
    messages: Sequence[RenderedMessage],
    mark: str,
    tools: Sequence[Mapping[str, object]] | None,
) -> SupervisedTokens:
    """Encode messages, whose texts are marked, and find the assistant's tokens.

    Raises:
        TemplateError: the template refuses the messages, or its text does not tell where the
            turns of the assistant are.
    """
    text = chat.template.render(messages, tools=tools)
    tag = chat.vocabulary.tags.get(chat.traits.header)
    if tag is not None:
        ids = chat.vocabulary.encode_marked(text, mark, is_start=True)
        if ids.count(tag) == sum(each["role"] == "assistant" for each in messages):
            return SupervisedTokens(ids, _written_after(ids, tag, chat.end_ids))
    ids, starts = chat.vocabulary.encode_with_starts(text, mark, is_start=True)
    written = [False] * len(ids)
    turns = list(_find_turns(chat, messages, text, tools))
    for place, (begin, limit) in enumerate(turns):
        following = turns[place + 1][0] if place + 1 < len(turns) else len(text)
        first, last = bisect_left(starts, begin), bisect_left(starts, following)
        end = next((i + 1 for i in range(first, last) if ids[i] in chat.end_ids), None)
        if end is None:
            end = bisect_left(starts, limit) if limit else last
        written[first:end] = [True] * (end - first)
    return SupervisedTokens(ids, written)


def _written_after(ids: Sequence[int], header: int, ends: frozenset[int]) -> list[bool]:
    """Mark what follows each header of one token, up to the end of the turn."""
    written: list[bool] = []
    is_open = False
    for token in ids:
        written.append(is_open)
        is_open = token == header or (is_open and token not in ends)
    return written


def _find_turns(
    chat: "ChatFormat",
    messages: Sequence[RenderedMessage],
    text: str,
    tools: Sequence[Mapping[str, object]] | None,
) -> Iterator[tuple[int, int]]:
    """Find where the assistant's turns begin in the text, and where they end at the latest.

    Raises:
        TemplateError: they cannot be found.
    """
    replies = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
    header = chat.traits.header
    # Foreign text cannot hold a tag, so a header with one stands where the template wrote it.
    if chat.vocabulary.finder.find(header) and text.count(header) == len(replies):
        place = 0
        for _ in replies:
            place = text.index(header, place) + len(header)
            yield place, 0
        return
    previous = 0
    for index in replies:
        before = chat.template.render(messages[:index], tools=tools, add_generation_prompt=True)
        begin = _common_size(before, text)
        after = chat.template.render(messages[: index + 1], tools=tools)
        limit = _common_size(after, text)
        frame = len(before) - len(chat.traits.generation_prompt)
        if not max(previous, frame) <= begin <= limit:
            raise TemplateError(
                f"the turn of messages[{index}] cannot be found in the template's text, because"
                " the template rewrites earlier turns"
            )
        previous = limit
        yield begin, limit


def _common_size(one: str, other: str) -> int:
    """Length of the common beginning."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
