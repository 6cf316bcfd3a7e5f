"""Traits of a chat template, found by rendering small conversations with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from etude.agent.chat.planting import TokenFinder
from etude.agent.chat.template import (
    ChatTemplate,
    TemplateError,
    refuse_template,
)
from etude.agent.tool_messages import RenderedMessage

SYSTEM, INSTRUCTION, REPLY, RESULT = (
    "Probe system.",
    "Probe instruction.",
    "Probe reply.",
    "Probe result.",
)
"""Contents of the small conversations."""
SECOND = "Second"
_THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """Facts about one template."""

    has_system: bool
    """It renders a system message; otherwise the text goes before the first user message."""
    moves_system: bool
    """It renders the system message at the last user message, wherever that is."""
    has_tool_role: bool
    """It renders tool messages after turns of plain text, turn after turn."""
    header: str
    """Text before every turn of the assistant, and before what a policy samples."""
    generation_prompt: str
    """Text that add_generation_prompt adds."""
    end: str
    """Tag that ends the assistant's turns; empty if the template writes none."""
    frame: frozenset[str]
    """Tags that the template writes around texts."""
    thinking: tuple[str, str] | None
    """Texts that open and close thinking; None if the model has no known ones."""

    @property
    def opens_with_system(self) -> bool:
        """True if a rollout begins with a system message, which stays in its place."""
        # Results that are user messages would each be given the system text again.
        return self.has_system and (self.has_tool_role or not self.moves_system)

    def opens_thinking(self, rendered: str) -> bool:
        """True if the generation prompt at the end of a rendered text leaves thinking open.

        Some templates open it after the user's messages only, not after results.
        """
        return self.thinking is not None and rendered.rstrip().endswith(self.thinking[0])


def make_message(role: str, content: str) -> RenderedMessage:
    """One message as templates read it."""
    return {"role": role, "content": content}


def find_traits(template: ChatTemplate, finder: TokenFinder) -> TemplateTraits:
    """Find a template's traits.

    Raises:
        UserError: the template cannot render an instruction and a reply.
    """
    user, reply = make_message("user", INSTRUCTION), make_message("assistant", REPLY)
    once = _render_required(template, [user, reply], (INSTRUCTION, REPLY))
    opening = _render_required(template, [user], (INSTRUCTION,), prompt=True)
    bare = _try(template, [user], (INSTRUCTION,))
    twice = [
        user,
        reply,
        make_message("user", SECOND + INSTRUCTION),
        make_message("assistant", SECOND),
    ]
    longer = _try(template, twice, (SECOND + INSTRUCTION, SECOND)) or once
    prompt = opening[len(bare) :] if bare is not None and opening.startswith(bare) else ""
    tools = [user, *_turn(REPLY, 2), *_turn(REPLY, 1)]
    tooled = _try(template, tools, (RESULT,), prompt=True)
    system = [make_message("system", SYSTEM), user]
    opened = _try(template, system, (SYSTEM, INSTRUCTION), prompt=True)
    later = _try(template, [system[0], *twice], (SYSTEM, INSTRUCTION))
    texts = [once, longer, opening, tooled or "", opened or ""]
    return TemplateTraits(
        has_system=opened is not None,
        moves_system=later is not None and later.index(SYSTEM) > later.index(INSTRUCTION),
        has_tool_role=tooled is not None and (tooled.count(REPLY), tooled.count(RESULT)) == (2, 3),
        header=_find_header(prompt, bare or opening, once),
        generation_prompt=prompt,
        end=_find_end(once, finder) or _find_end(longer, finder),
        frame=frozenset(tag for text in texts for tag in _tags_of(text, finder)),
        thinking=_find_thinking(template, finder),
    )


def _turn(reply: str, num_results: int) -> Iterator[RenderedMessage]:
    yield make_message("assistant", reply)
    yield from [make_message("tool", RESULT)] * num_results


def _render_required(
    template: ChatTemplate,
    messages: Sequence[RenderedMessage],
    texts: Sequence[str],
    *,
    prompt: bool = False,
) -> str:
    try:
        text = template.render(messages, add_generation_prompt=prompt)
    except TemplateError as error:
        roles = " and ".join(each["role"] for each in messages)
        refuse_template(template.path, f"the chat template fails at {roles}: {error}")
    for each in texts:
        if each not in text:
            what = "nothing" if not text.strip() else "not the text of a message"
            refuse_template(template.path, f"the chat template renders {what}")
    return text


def _try(
    template: ChatTemplate,
    messages: Sequence[RenderedMessage],
    texts: Sequence[str],
    *,
    prompt: bool = False,
) -> str | None:
    try:
        text = template.render(messages, add_generation_prompt=prompt)
    except TemplateError:
        return None
    return text if all(each in text for each in texts) else None


def _find_header(prompt: str, bare: str, once: str) -> str:
    """The part of the generation prompt that every turn begins with."""
    if not once.startswith(bare):
        return ""
    return _common_start(prompt, once[len(bare) : once.index(REPLY)])


def _common_start(one: str, other: str) -> str:
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    return one[:size]


def _find_end(text: str, finder: TokenFinder) -> str:
    """The tag that follows a reply."""
    rest = text[text.index(REPLY) + len(REPLY) :]
    tag = finder.find(rest)
    return tag[0] if tag is not None and not rest[: tag.start()].strip() else ""


def _tags_of(text: str, finder: TokenFinder) -> Iterator[str]:
    place = 0
    while tag := finder.find(text, place):
        yield tag[0]
        place = tag.end()


def _find_thinking(template: ChatTemplate, finder: TokenFinder) -> tuple[str, str] | None:
    for pair in _THINKING:
        if all(tag in finder.tokens for tag in pair) or pair[1] in template.source:
            return pair
    return None
