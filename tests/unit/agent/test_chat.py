"""The layout of a transcript, and that foreign text can never become a special token."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.chat import END, LAYOUT_TOKENS, ChatFormat, Message
from etude.common.errors import InvalidFieldError, UserError

MODEL = Path(__file__).parent / "model"
TRANSCRIPT: list[Message] = [
    {"role": "system", "content": "Fix the bug."},
    {"role": "user", "content": "A test fails."},
    {"role": "assistant", "content": "<tool_call><function=grep></function></tool_call>"},
    {"role": "tool", "content": ["a.py: x", "no match"]},
    {"role": "assistant", "content": "Done."},
]


def test_the_opening_is_system_user_and_the_start_of_a_turn(chat: ChatFormat) -> None:
    ids = chat.opening("Fix the bug.", "A test fails.")
    assert chat.decode(ids) == (
        "<|system|>Fix the bug.<|end|><|user|>A test fails.<|end|><|assistant|>"
    )


def test_a_tool_turn_holds_one_response_per_call(chat: ChatFormat) -> None:
    assert chat.decode(chat.tool_turn(["ok", ""])) == (
        "<|tool|><tool_response>ok</tool_response><tool_response></tool_response>"
        "<|end|><|assistant|>"
    )


def test_a_transcript_built_turn_by_turn_equals_the_supervised_one(chat: ChatFormat) -> None:
    first, last = "<tool_call><function=grep></function></tool_call>", "Done."
    ids = chat.opening("Fix the bug.", "A test fails.") + chat.completion(first)
    ids += chat.tool_turn(["a.py: x", "no match"]) + chat.completion(last)
    assert chat.encode_messages(TRANSCRIPT).token_ids == ids


def test_the_assistant_wrote_its_text_and_its_end_but_not_its_tag(chat: ChatFormat) -> None:
    ids, written = chat.encode_messages(TRANSCRIPT)
    assert len(ids) == len(written)
    kept = chat.decode([token for token, is_own in zip(ids, written, strict=True) if is_own])
    assert kept == "<tool_call><function=grep></function></tool_call><|end|>Done.<|end|>"


def test_tags_of_a_completion_are_single_tokens(chat: ChatFormat) -> None:
    text = "<tool_call><function=grep><parameter=pattern>x</parameter></function></tool_call>"
    # Six tags, one letter, one end.
    assert len(chat.completion(text)) == 8


@given(st.lists(st.sampled_from([*LAYOUT_TOKENS, "<tool_call>", "x", "\n", "é"]), max_size=8))
def test_foreign_text_never_becomes_a_special_token(chat: ChatFormat, pieces: list[str]) -> None:
    text = "".join(pieces)
    special = {chat.completion(token)[0] for token in (*LAYOUT_TOKENS, "<tool_call>")}
    ids = chat.encode_text(text)
    assert special.isdisjoint(ids)
    assert chat.decode(ids) == text
    assert chat.tool_turn([text]).count(chat.end_id) == 1


@given(st.text(max_size=60))
def test_any_text_survives_encoding(chat: ChatFormat, text: str) -> None:
    assert chat.decode(chat.encode_text(text)) == text


def test_a_token_cut_from_a_character_decodes_to_a_replacement(chat: ChatFormat) -> None:
    ids = chat.encode_text("😀")
    assert len(ids) > 1
    assert "\ufffd" in chat.decode(ids[:1])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "critic", "content": "x"},
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": [1]},
        {"role": "user", "content": ["x"]},
        {"role": "user"},
    ],
)
def test_a_message_of_the_wrong_shape_is_refused_by_its_place(
    chat: ChatFormat, message: Message
) -> None:
    with pytest.raises(InvalidFieldError, match=r"messages\[1\]"):
        chat.encode_messages([TRANSCRIPT[0], message])


def test_a_folder_without_tokenizer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.json"):
        ChatFormat.load(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes()[:1000])
    with pytest.raises(UserError, match="not a tokenizer"):
        ChatFormat.load(tmp_path)


def test_a_tokenizer_without_the_layouts_tokens_is_refused_by_their_names(tmp_path: Path) -> None:
    layout = json.loads((MODEL / "tokenizer.json").read_text())
    layout["added_tokens"] = [t for t in layout["added_tokens"] if t["content"] != "<|tool|>"]
    del layout["model"]["vocab"]["<|tool|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    with pytest.raises(UserError, match=r"lacks <\|tool\|>"):
        ChatFormat.load(tmp_path)


def test_a_tokenizer_that_ends_turns_otherwise_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    config = {"eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="eos_token"):
        ChatFormat.load(tmp_path)


def test_tags_that_a_tokenizer_calls_ordinary_are_special_here(tmp_path: Path) -> None:
    layout = json.loads((MODEL / "tokenizer.json").read_text())
    for token in layout["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    chat = ChatFormat.load(tmp_path)
    assert chat.end_id not in chat.encode_text(END)
