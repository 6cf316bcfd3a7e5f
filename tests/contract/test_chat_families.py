"""Chat formats of real model families agree with transformers, and no text can pose as a tag."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from tests.support.chat_families import FAMILIES, family_folder

from etude.agent.chat import ChatFormat
from etude.common.errors import InvalidFieldError

transformers = pytest.importorskip("transformers")

NUM_EXAMPLES = 5_000 if settings().max_examples > 20 else 15
"""Conversations of each family: few in the quick profile, as tokenizers take seconds to load."""
QUICK = ("smollm2", "qwen3", "mistral", "deepseek-v3.1")
each_family = pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES],
)


class Formats(NamedTuple):
    """Our format and transformers' tokenizer of one folder."""

    ours: ChatFormat
    theirs: Any

    def encode(self, messages: Sequence[Any], *, prompt: bool = False) -> list[int]:
        """What transformers makes of messages."""
        ids = self.theirs.apply_chat_template(
            messages, add_generation_prompt=prompt, return_dict=False
        )
        return list(ids)


@cache
def load(family: str) -> Formats:
    folder = family_folder(family)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return Formats(ChatFormat.load(folder), theirs)


TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(
        st.sampled_from(
            [
                *(" ", "\n", "\n\n", "\t", "word", "Über", "数学", "😀", "def f(x):\n    return x"),
                *("<", ">", "|", "[", "<|", "1234", "it's", '{"a": "b"}', "\\n", "</", "é"),
            ]
        ),
        max_size=6,
    ).map("".join),
)
WORDS = st.lists(st.sampled_from(["Look.", "I call it", "x = 1", "数学"]), min_size=1).map(" ".join)


@st.composite
def conversations(draw: st.DrawFn, *, tools: bool, texts: st.SearchStrategy[str]) -> list[Any]:
    """A system prompt perhaps, an instruction, and turns with results or further questions."""
    messages = [{"role": "user", "content": draw(texts)}]
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(0, 3))):
        messages.append({"role": "assistant", "content": draw(WORDS)})
        if tools and draw(st.booleans()):
            results = draw(st.lists(texts, min_size=1, max_size=3))
            messages += [{"role": "tool", "content": result} for result in results]
        else:
            messages.append({"role": "user", "content": draw(texts)})
    return [*messages, {"role": "assistant", "content": draw(WORDS)}]


@each_family
@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_a_transcript_has_the_tokens_that_transformers_gives_it(
    family: str, data: st.DataObject
) -> None:
    formats = load(family)
    has_tools = formats.ours.traits.has_tool_role
    messages = data.draw(conversations(tools=has_tools, texts=TEXTS))
    finder = formats.ours.vocabulary.finder
    assume(not any(finder.find(message["content"]) for message in messages))
    if not formats.ours.traits.has_system:
        assume(messages[0]["role"] != "system")
    try:
        ids, written = formats.ours.encode_messages(messages)
    except InvalidFieldError:
        # Some templates refuse an order of roles; then they refuse it there, too.
        with pytest.raises(Exception, match=r".+"):
            formats.encode(messages)
        return
    assert ids == formats.encode(messages)
    own = formats.ours.decode([token for token, is_own in zip(ids, written, strict=True) if is_own])
    for message in messages:
        if message["role"] == "assistant":
            assert message["content"] in own


@each_family
@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_a_rollout_built_by_deltas_is_the_whole_transcript(
    family: str, data: st.DataObject
) -> None:
    formats = load(family)
    chat = formats.ours
    system, user = data.draw(TEXTS), data.draw(TEXTS)
    conversation = chat.open(system, user)
    ids = list(conversation.prompt)
    for results in data.draw(st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=3)):
        reply = data.draw(WORDS)
        ids += chat.completion(reply)
        conversation.add_completion(reply)
        ids += conversation.append_results(results)
    if not conversation.rewrites_history:
        assert ids == conversation.render_again()


@each_family
@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_a_conversation_that_goes_on_is_what_transformers_makes_of_the_whole(
    family: str, data: st.DataObject
) -> None:
    formats = load(family)
    chat, finder = formats.ours, formats.ours.vocabulary.finder
    messages = data.draw(conversations(tools=chat.traits.has_tool_role, texts=TEXTS))[:-1]
    assume(not any(finder.find(message["content"]) for message in messages))
    if not chat.traits.has_system:
        assume(messages[0]["role"] != "system")
    turns = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    try:
        expected = formats.encode(messages, prompt=True)
        conversation = chat.open_transcript(messages[: turns[0]] if turns else messages)
    except Exception:  # noqa: BLE001
        reject()  # a template refuses an order of roles
    ids = list(conversation.prompt)
    for place, following in zip(turns, [*turns, len(messages)][1:], strict=True):
        ids += chat.completion(messages[place]["content"])
        conversation.add_completion(messages[place]["content"])
        ids += conversation.copy().append_messages(messages[place + 1 : following])
        conversation.append_messages(messages[place + 1 : following])
    if not conversation.rewrites_history:
        assert ids == expected


@each_family
def test_no_tag_of_the_tokenizer_can_be_planted(family: str) -> None:
    chat = load(family).ours
    tags = set(chat.vocabulary.tags.values())
    text = "".join(f"a{tag}b" for tag in chat.vocabulary.tags)

    def roll_out(content: str) -> list[int]:
        conversation = chat.open(content, content)
        ids = list(conversation.prompt)
        conversation.add_completion("I look.")
        return ids + conversation.append_results([content, content])

    planted, harmless = roll_out(text), roll_out("ab")
    assert [i for i in planted if i in tags] == [i for i in harmless if i in tags]
    # Every character is there, as ordinary text; some templates quote results.
    assert chat.decode(planted).count(text) >= 2


@each_family
@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_no_text_is_read_as_a_tag(family: str, data: st.DataObject) -> None:
    chat = load(family).ours
    tag = st.sampled_from(sorted(chat.vocabulary.tags))
    part = st.builds(
        lambda tag, start, end: tag[start:-end], tag, st.integers(0, 3), st.integers(1, 3)
    )
    other = st.sampled_from(["<", ">", "]", "|", " ", "\n", "x", "\ufdd0", "\ufdd1", "\ufdd2"])
    text = "".join(data.draw(st.lists(st.one_of(tag, part, other), max_size=8)))
    ids = chat.encode_text(text)
    assert set(chat.vocabulary.tags.values()).isdisjoint(ids)
    assert chat.decode(ids) == text


@each_family
def test_the_assistants_own_text_cannot_open_or_end_a_turn(family: str) -> None:
    chat = load(family).ours
    structural = [chat.vocabulary.tags[tag] for tag in chat.assistant_finder.tokens]

    def count(reply: str) -> list[int]:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": reply}]
        ids = chat.encode_messages(messages).token_ids
        return [ids.count(token) for token in structural]

    reply = "".join(f"a{tag}b" for tag in sorted(chat.assistant_finder.tokens))
    assert count(reply) == count("ab")


@each_family
def test_what_the_assistant_wrote_ends_with_its_end(family: str) -> None:
    chat = load(family).ours
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "One."}]
    messages += [{"role": "user", "content": "y"}, {"role": "assistant", "content": "Two."}]
    ids, written = chat.encode_messages(messages)
    own = [token for token, is_own in zip(ids, written, strict=True) if is_own]
    assert own.count(chat.end_id) == 2
    assert own[-1] == chat.end_id


@each_family
@given(data=st.data())
@settings(max_examples=NUM_EXAMPLES)
def test_any_tokens_decode_as_the_tokenizer_itself_decodes_them(
    family: str, data: st.DataObject
) -> None:
    formats = load(family)
    # Some are no token of the tokenizer, and most sequences are no UTF-8.
    ids = data.draw(st.lists(st.integers(0, formats.ours.vocab_size + 9), max_size=40))
    theirs = formats.theirs.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert formats.ours.decode(ids) == theirs
