"""Rollouts in the families' own tool formats have the tokens that transformers gives them."""

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.chat_families import FAMILIES, family_folder

from etude.agent.chat import ChatFormat, Conversation
from etude.agent.chat.native_form import find_native_form
from etude.agent.chat.pieces import PieceReader
from etude.agent.chat.thinking import remove_thinking
from etude.agent.tool_calls import ParsedCall, cut_calls
from etude.agent.tool_formats.xml import as_texts
from etude.agent.tool_messages import make_call_message, make_result_messages
from etude.agent.toolsets import Toolset, list_schemas, toolset
from etude.common.errors import UserError

transformers = pytest.importorskip("transformers")

NUM_EXAMPLES = 5_000 if settings().max_examples > 20 else 15
QUICK = ("qwen3", "mistral-nemo", "deepseek-v3.1")
each_family = pytest.mark.parametrize(
    "family",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
        for name, family in FAMILIES.items()
        if family.has_tools
    ],
)
ONE_CALL = {"llama3"}
"""Families whose template takes one call in a turn."""
ONLY_CALLS = {"llama3", "mistral-nemo"}
"""Families whose template drops the text beside calls."""
ONE_PROMPT = {"mistral-nemo"}
"""Families whose template writes no tag between the system prompt and the instruction."""
UNMARKED_RESULTS = {"deepseek-v4": "</tool_result>", "qwen2.5": "</tool_response>"}
"""Text between results where the template writes no tag there."""
THINKING = {"qwen3": "<think>\nHm.\n</think>\n\n", "qwen3.6": "<think>\nHm.\n</think>\n\n"}
"""Families whose template takes thinking as part of the text."""


class Native(NamedTuple):
    """One family: its format, its tools as its template shows them, transformers' tokenizer."""

    chat: ChatFormat
    tools: Toolset
    theirs: Any

    def encode(self, messages: Sequence[Any]) -> list[int]:
        """What transformers makes of messages, as the prompt of the next turn."""
        assert self.tools.shown is not None
        ids = self.theirs.apply_chat_template(
            messages,
            tools=list(self.tools.shown.schemas),
            add_generation_prompt=True,
            return_dict=False,
        )
        return list(ids)


@cache
def load(family: str) -> Native:
    folder = family_folder(family)
    chat = ChatFormat.load(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tools = toolset("Compact")
    return Native(chat, tools.with_form(find_native_form(chat, tools.schemas())), theirs)


TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=30),
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
PATHS = st.sampled_from(["a.py", "shop/core.py", "数学 é.py", 'quote".py'])
calls = st.one_of(
    st.builds(
        ParsedCall, name=st.just("read_file"), arguments=st.fixed_dictionaries({"path": PATHS})
    ),
    st.builds(
        ParsedCall,
        name=st.just("search_replace"),
        arguments=st.fixed_dictionaries(
            {"path": PATHS, "old_string": TEXTS, "new_string": TEXTS, "count": st.integers(-9, 99)}
        ),
    ),
    st.builds(
        ParsedCall,
        name=st.just("grep"),
        arguments=st.fixed_dictionaries({"pattern": TEXTS, "paths": st.lists(PATHS, max_size=2)}),
    ),
)
WORDS = st.sampled_from(["", "Look.", "I call it", "数学"])


def is_harmless(native: Native, *texts: str) -> bool:
    finder = native.chat.vocabulary.finder
    # Carriage returns are newlines to a template, and some tokenizers normalise text.
    return not any(
        finder.find(text) or "\r" in text or not unicodedata.is_normalized("NFC", text)
        for text in texts
    )


class Turn(NamedTuple):
    """One turn of a rollout."""

    content: str
    calls: list[ParsedCall]
    results: list[str]


@st.composite
def turns(draw: st.DrawFn, family: str) -> Turn:
    made = draw(st.lists(calls, min_size=1, max_size=1 if family in ONE_CALL else 3))
    results = draw(st.lists(TEXTS, min_size=len(made), max_size=len(made)))
    content = "" if family in ONLY_CALLS else draw(WORDS)
    return Turn(THINKING.get(family, "") + content, made, results)


def take_turn(native: Native, conversation: Conversation, text: str) -> list[ParsedCall]:
    """Read a sampled text as a rollout does, and note it."""
    parsed = native.tools.tool_format.parse(
        remove_thinking(
            native.chat, text, native.tools.tool_format, is_open=conversation.opens_thinking
        )
    )
    found = [call for call in parsed.calls if isinstance(call, ParsedCall)]
    assert len(found) == len(parsed.calls)
    conversation.add_completion(text, content=cut_calls(text, found), calls=found)
    return found


@each_family
@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_a_rollout_with_calls_has_the_tokens_that_transformers_gives_it(
    family: str, data: st.DataObject
) -> None:
    native = load(family)
    assert native.tools.shown is not None
    user = data.draw(TEXTS)
    made = data.draw(st.lists(turns(family), max_size=3))
    written = [value for turn in made for call in turn.calls for value in call.arguments.values()]
    assume(is_harmless(native, user, *(value for value in written if isinstance(value, str))))
    assume(all(is_harmless(native, *turn.results) for turn in made))
    conversation = native.chat.open(native.tools.system_prompt, user, native.tools.shown)
    messages: list[Any] = [
        {"role": "system", "content": native.tools.system_prompt},
        {"role": "user", "content": user},
    ]
    ids = list(conversation.prompt)
    assert ids == native.encode(messages)
    num_calls = 0
    for content, expected, results in made:
        turn = make_call_message(native.tools.shown, content, expected, first=num_calls)
        num_calls += len(expected)
        messages += [turn, *make_result_messages(turn, results)]
        whole = native.encode(messages)
        assert whole[: len(ids)] == ids
        end = next(i for i in range(len(ids), len(whole)) if whole[i] in native.chat.end_ids)
        found = take_turn(native, conversation, native.chat.decode(whole[len(ids) : end]))
        is_typeless = native.tools.tool_format.name == "xml"
        assert found == [as_texts(call) if is_typeless else call for call in expected]
        ids = whole[: end + 1] + conversation.append_results(results)
        assert ids == whole
    assert ids == conversation.render_again()
    assert not conversation.rewrites_history
    assert not conversation.num_text_turns


@each_family
def test_no_tag_can_be_planted_in_a_result_or_an_argument(family: str) -> None:
    native = load(family)
    tags = native.chat.vocabulary.tags
    own = {tags[tag] for tag in native.chat.assistant_finder.tokens}
    text = "".join(f"a{tag}b" for tag in tags)

    def roll_out(content: str) -> tuple[list[int], list[int]]:
        conversation = native.chat.open(content, content, native.tools.shown)
        call = ParsedCall(name="read_file", arguments={"path": content, content: "x"})
        conversation.add_completion("It was sampled.", calls=[call])
        delta = conversation.append_results([content])
        assert not conversation.num_text_turns
        return conversation.prompt + delta, conversation.render_again()

    (planted, again), (harmless, expected) = roll_out(text), roll_out("ab")
    assert [i for i in planted if i in tags.values()] == [i for i in harmless if i in tags.values()]
    # In its own calls, tags that neither end nor open a turn are the assistant's.
    assert [i for i in again if i in own] == [i for i in expected if i in own]


@each_family
def test_messages_are_found_again_in_the_tokens(family: str) -> None:
    native = load(family)
    conversation = native.chat.open("Be <b>good.", "Fix <it>.", native.tools.shown)
    made = [ParsedCall(name="read_file", arguments={"path": "a.py"})] * 2
    made = made[:1] if family in ONE_CALL else made
    conversation.add_completion(native.tools.tool_format.render(made), calls=made)
    delta = conversation.append_results(["x = 1", "y <= 2"][: len(made)])
    reader = PieceReader.of(native.chat, list_schemas())
    opening = {piece.role: piece.text for piece in reader.read_opening(conversation.prompt)}
    if family in ONE_PROMPT:
        assert opening == {"user": "Be <b>good.\n\nFix <it>."}
    else:
        assert opening["user"] == "Fix <it>."
        assert "Be <b>good." in opening["system"]
    results = [piece.text for piece in reader.read_results(delta) if piece.role == "tool"]
    if family in UNMARKED_RESULTS:
        results = results[0].split(UNMARKED_RESULTS[family])
    assert len(results) == len(made)
    assert all(text in found for text, found in zip(["x = 1", "y <= 2"], results, strict=False))


@each_family
def test_a_turn_that_the_template_refuses_as_calls_goes_on_as_text(family: str) -> None:
    native = load(family)
    made = [ParsedCall(name="read_file", arguments={"path": name}) for name in ("a.py", "b.py")]
    text = native.tools.tool_format.render(made)
    conversation = native.chat.open("S", "I", native.tools.shown)
    conversation.add_completion(text, calls=made)
    delta = native.chat.decode(conversation.append_results(["one result", "another"]))
    assert delta.count("one result") == delta.count("another") == 1
    assert conversation.num_text_turns == (family in ONE_CALL)


def test_a_result_has_the_id_that_the_model_gave_its_call() -> None:
    native = load("mistral-nemo")
    conversation = native.chat.open("S", "I", native.tools.shown)
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "Ab3456789"}]'
    take_turn(native, conversation, text)
    assert '"call_id": "Ab3456789"' in native.chat.decode(conversation.append_results(["R"]))


def test_a_family_that_was_taught_no_calls_is_refused_by_the_field() -> None:
    chat = ChatFormat.load(family_folder("smollm2"))
    with pytest.raises(UserError, match=r"rollout.toolFormat.*Native(.|\n)*toolFormat: Xml"):
        find_native_form(chat, toolset("Compact").schemas())
