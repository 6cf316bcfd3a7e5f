"""Messages in the tokens that the harness wrote, for reports: roles, texts and where they are.

The template's frames are found again by their tags, which no text of a message can hold as tokens.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

from etude.agent.chat.native_form import find_native_form
from etude.agent.chat.template import TemplateError
from etude.agent.chat.traits import INSTRUCTION, REPLY, RESULT, SECOND, SYSTEM
from etude.agent.tool_calls import ParsedCall
from etude.agent.tool_formats.registry import find_tool_format
from etude.agent.tool_messages import NativeForm
from etude.common.errors import UserError

if TYPE_CHECKING:
    from etude.agent.chat.format import ChatFormat


class Piece(NamedTuple):
    """One message with its frame; the frame of the assistant's turn is a piece without text."""

    role: str
    text: str
    start: int
    end: int
    """Tokens [start, end)."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Text that the template writes between two texts of messages."""

    lead: str
    """Text before the first tag."""
    core: tuple[int, ...]
    """Tokens from the first tag to the last; empty without a tag."""
    tail: str
    """Text behind the last tag."""
    cut: int
    """Tokens of core that belong to the message before."""

    @classmethod
    def of(cls, chat: "ChatFormat", text: str) -> Self:
        vocabulary = chat.vocabulary
        ids = vocabulary.encode_tagged(text)
        tags = set(vocabulary.tags.values())
        places = [place for place, token in enumerate(ids) if token in tags]
        if not places:
            return cls(text, (), "", 0)
        first, last = places[0], places[-1]
        core = tuple(ids[first : last + 1])
        ends = [place for place, token in enumerate(core) if token in chat.end_ids]
        cut = ends[0] + 1 if ends else 1
        return cls(vocabulary.decode(ids[:first]), core, vocabulary.decode(ids[last + 1 :]), cut)


class _Form(NamedTuple):
    """Frames of the messages that the harness writes, with or without tools in the template."""

    roles: tuple[str, ...]
    """Of the first prompt."""
    opening: tuple[_Frame, ...]
    """Around the texts of the first prompt."""
    results: tuple[_Frame, ...]
    """Around and between results; empty if the template does not tell."""


@dataclass(slots=True)
class PieceReader:
    """Finds the messages in what the harness wrote."""

    chat: "ChatFormat"
    _forms: list[_Form]
    """Those that were needed until now."""
    _further: Iterator[_Form]
    """Found when they are needed: nearly always the first is enough."""

    @classmethod
    def of(
        cls, chat: "ChatFormat", toolsets: Iterable[Sequence[Mapping[str, object]]] = ()
    ) -> Self:
        """Find the frames by rendering a small conversation.

        Args:
            chat: of the model.
            toolsets: JSON schemas of tools that the template may have shown.
        """
        return cls(chat, [_find_form(chat)], _find_native_forms(chat, toolsets))

    def read_opening(self, ids: Sequence[int]) -> list[Piece]:
        """Messages of a first prompt."""
        for form in self._all_forms():
            found = _find_frames(ids, form.opening, most=len(form.roles) + 1)
            if len(found) > len(form.roles):
                return list(self._split(ids, found, form.roles))
        return [Piece("user", self.chat.decode(ids), 0, len(ids))]

    def read_results(self, ids: Sequence[int]) -> list[Piece]:
        """Results between two turns."""
        for form in self._all_forms():
            if found := _find_frames(ids, form.results):
                return list(self._split(ids, found, ("tool",)))
        return [Piece("tool", self.chat.decode(ids), 0, len(ids))]

    def _all_forms(self) -> Iterator[_Form]:
        yield from self._forms
        for form in self._further:
            self._forms.append(form)
            yield form

    def _split(
        self, ids: Sequence[int], found: Sequence[tuple[_Frame, int]], roles: Sequence[str]
    ) -> Iterator[Piece]:
        """Pieces that cover the tokens in order."""
        start = 0
        for index, ((before, place), (after, following)) in enumerate(pairwise(found)):
            text = self.chat.decode(ids[place + len(before.core) : following])
            text = text.removeprefix(before.tail).removesuffix(after.lead)
            end = following + after.cut
            yield Piece(roles[min(index, len(roles) - 1)], text, start, end)
            start = end
        if start < len(ids):
            yield Piece("assistant", "", start, len(ids))


def _find_form(chat: "ChatFormat", native: NativeForm | None = None) -> _Form:
    """Find the frames around texts, of tools in the model's own form if one is given."""
    conversation = chat.open(SYSTEM, INSTRUCTION, None if native is None else native.shown)
    has_system = chat.traits.opens_with_system
    roles = ("system", "user") if has_system else ("user",)
    texts = (SYSTEM, INSTRUCTION) if has_system else (f"{SYSTEM}\n\n{INSTRUCTION}",)
    opening = _frames(chat, chat.decode(conversation.prompt), texts)
    if not all(frame.core for frame in opening[1:-1]):  # nothing tells where the first text ends
        roles, opening = ("user",), (opening[0], opening[-1])
    calls = () if native is None else [ParsedCall(name="read_file", arguments={"path": "a"})] * 2
    conversation.add_completion(REPLY, calls=calls)
    try:
        delta = conversation.append_results([RESULT, SECOND])
    except TemplateError:
        return _Form(roles, opening, ())
    return _Form(roles, opening, _frames(chat, chat.decode(delta), (RESULT, SECOND)))


def _find_native_forms(
    chat: "ChatFormat", toolsets: Iterable[Sequence[Mapping[str, object]]]
) -> Iterator[_Form]:
    """Find the frames around texts where the template shows the tools of a toolset."""
    if find_tool_format(chat.template.source, chat.vocabulary.tags) is None:
        return
    for schemas in toolsets:
        with contextlib.suppress(UserError):
            yield _find_form(chat, find_native_form(chat, schemas))


def _frames(chat: "ChatFormat", text: str, contents: Sequence[str]) -> tuple[_Frame, ...]:
    frames: list[_Frame] = []
    for content in contents:
        before, found, text = text.partition(content)
        if not found:
            return ()
        frames.append(_Frame.of(chat, before))
    return (*frames, _Frame.of(chat, text))


def _find_frames(
    ids: Sequence[int], frames: Sequence[_Frame], *, most: int = 0
) -> list[tuple[_Frame, int]]:
    """Places of the frames: the first, as many of the middle one as there are, and the last.

    Empty if the first or the last is not there; at most `most` places, without a limit if it is 0.
    """
    if not frames or not all(frame.core for frame in (frames[0], frames[-1])):
        return []
    first = _find(ids, frames[0].core, 0)
    last = _find_last(ids, frames[-1].core)
    if first is None or last is None or last < first + len(frames[0].core):
        return []
    found = [(frames[0], first)]
    place = first + len(frames[0].core)
    middle = frames[1] if len(frames) > 2 else None
    while middle is not None and middle.core and (not most or len(found) + 1 < most):
        following = _find(ids, middle.core, place)
        if following is None or following >= last:
            break
        found.append((middle, following))
        place = following + len(middle.core)
    return [*found, (frames[-1], last)]


def _find(ids: Sequence[int], core: tuple[int, ...], start: int) -> int | None:
    for place in range(start, len(ids) - len(core) + 1):
        if ids[place] == core[0] and tuple(ids[place : place + len(core)]) == core:
            return place
    return None


def _find_last(ids: Sequence[int], core: tuple[int, ...]) -> int | None:
    for place in range(len(ids) - len(core), -1, -1):
        if ids[place] == core[0] and tuple(ids[place : place + len(core)]) == core:
            return place
    return None
