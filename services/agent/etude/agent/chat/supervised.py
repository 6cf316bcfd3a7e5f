"""Transcripts for supervised training: the template's tokens, and which of them were written."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from etude.agent.chat.template import TemplateError
from etude.agent.tool_messages import RenderedMessage

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
    turns = list(
        _find_after_headers(chat, messages, text)
        or _find_between_frames(chat, messages, text, mark, tools)
        or _find_by_prefixes(chat, messages, text, tools)
    )
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


def _find_after_headers(
    chat: "ChatFormat", messages: Sequence[RenderedMessage], text: str
) -> list[tuple[int, int]]:
    """Find each turn behind the header that the template writes for it; empty if it does not.

    Turns are pairs: where one begins in the text, and where it ends at the latest if known.
    """
    header = chat.traits.header
    num_replies = sum(each["role"] == "assistant" for each in messages)
    # Foreign text cannot hold a tag, so a header with one stands where the template wrote it.
    if chat.vocabulary.finder.find(header) is None or text.count(header) != num_replies:
        return []
    turns = []
    place = 0
    for _ in range(num_replies):
        place = text.index(header, place) + len(header)
        turns.append((place, 0))
    return turns


def _find_between_frames(
    chat: "ChatFormat",
    messages: Sequence[RenderedMessage],
    text: str,
    mark: str,
    tools: Sequence[Mapping[str, object]] | None,
) -> list[tuple[int, int]]:
    """Find each turn between what the template writes around placeholders; empty if it fails."""
    placeholder = f"{mark}{mark}turn{mark}"
    shown = [
        {**each, "content": placeholder} if each["role"] == "assistant" else each
        for each in messages
    ]
    try:
        first, *frames = chat.template.render(shown, tools=tools).split(placeholder)
    except TemplateError:
        return []
    num_replies = sum(each["role"] == "assistant" for each in messages)
    if len(frames) != num_replies or not all(frames) or not text.startswith(first):
        return []
    turns = []
    place = len(first)
    for index, frame in enumerate(frames):
        is_last = index == num_replies - 1
        end = len(text) - len(frame) if is_last else text.find(frame, place)
        if end < place or not text.startswith(frame, end):
            return []
        turns.append((place, end))
        place = end + len(frame)
    return turns


def _find_by_prefixes(
    chat: "ChatFormat",
    messages: Sequence[RenderedMessage],
    text: str,
    tools: Sequence[Mapping[str, object]] | None,
) -> Iterator[tuple[int, int]]:
    """Find each turn behind a rendering of what comes before it.

    Raises:
        TemplateError: the template rewrites what comes before.
    """
    previous = 0
    for index, each in enumerate(messages):
        if each["role"] != "assistant":
            continue
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
