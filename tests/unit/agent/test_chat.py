"""The layout of a transcript, and that foreign text can never become a special token."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chat_tokens import encode_opening, encode_results

from etude.agent.chat import CHAT_TEMPLATE, LAYOUT_TOKENS, ChatFormat, Message
from etude.common.errors import InvalidFieldError, UserError

END = "<|end|>"
MODEL = Path(__file__).parent / "model"
TRANSCRIPT: list[Message] = [
    {"role": "system", "content": "Fix the bug."},
    {"role": "user", "content": "A test fails."},
    {"role": "assistant", "content": "<tool_call><function=grep></function></tool_call>"},
    {"role": "tool", "content": ["a.py: x", "no match"]},
    {"role": "assistant", "content": "Done."},
]


def test_the_opening_is_system_user_and_the_start_of_a_turn(chat: ChatFormat) -> None:
    ids = encode_opening(chat, "Fix the bug.", "A test fails.")
    assert chat.decode(ids) == (
        "<|system|>Fix the bug.<|end|><|user|>A test fails.<|end|><|assistant|>"
    )


def test_a_tool_turn_holds_one_response_per_call(chat: ChatFormat) -> None:
    assert chat.decode(encode_results(chat, ["ok", ""])) == (
        "<|tool|><tool_response>ok</tool_response><tool_response></tool_response>"
        "<|end|><|assistant|>"
    )


def test_a_transcript_built_turn_by_turn_equals_the_supervised_one(chat: ChatFormat) -> None:
    first, last = "<tool_call><function=grep></function></tool_call>", "Done."
    ids = encode_opening(chat, "Fix the bug.", "A test fails.") + chat.completion(first)
    ids += encode_results(chat, ["a.py: x", "no match"]) + chat.completion(last)
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
    assert encode_results(chat, [text]).count(chat.end_id) == 1


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


def copy_model(folder: Path, **files: object) -> None:
    """The model's tokenizer in a folder of its own, with other JSON files in place of its own."""
    (folder / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_the_plain_template_needs_its_tokens_by_name(tmp_path: Path) -> None:
    copy_model(tmp_path, tokenizer_config={})
    layout = json.loads((MODEL / "tokenizer.json").read_text())
    layout["added_tokens"] = [t for t in layout["added_tokens"] if t["content"] != "<|tool|>"]
    del layout["model"]["vocab"]["<|tool|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with pytest.raises(UserError, match=r"lacks .*<\|tool\|>"):
        ChatFormat.load(tmp_path)


def test_the_plain_template_serves_a_model_without_one(tmp_path: Path, chat: ChatFormat) -> None:
    copy_model(tmp_path, tokenizer_config={})
    with pytest.raises(UserError, match=r"no chat_template(.|\n)*agent.chat.plain"):
        ChatFormat.load(tmp_path)
    command = [sys.executable, "-m", "etude.agent.chat.plain"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    (tmp_path / "chat_template.jinja").write_bytes(printed)
    plain = ChatFormat.load(tmp_path)
    assert plain.open("S", "I").prompt == chat.open("S", "I").prompt


def test_every_end_that_the_model_declares_ends_a_turn(tmp_path: Path, chat: ChatFormat) -> None:
    copy_model(tmp_path, generation_config={"eos_token_id": [0, 5]})
    assert ChatFormat.load(tmp_path).end_ids == {0, 5, chat.end_id}


def test_a_declared_end_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    copy_model(tmp_path, generation_config={"eos_token_id": "<|end|>"})
    with pytest.raises(UserError, match=r"generation_config.json.*eos_token_id is '<\|end\|>'"):
        ChatFormat.load(tmp_path)


def test_a_format_without_any_end_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    copy_model(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(UserError, match=r"eos_token_id"):
        ChatFormat.load(tmp_path)


@pytest.mark.parametrize("config", [{"vocab_size": 100}, {"text_config": {"vocab_size": 100}}])
def test_a_vocabulary_larger_than_the_embedding_is_refused(
    tmp_path: Path, config: dict[str, object]
) -> None:
    copy_model(tmp_path, config=config)
    with pytest.raises(UserError, match=r"embedding has 100 rows"):
        ChatFormat.load(tmp_path)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for m in messages %}", "does not parse"),
        ("{{ raise_exception('never') }}", "fails at user and assistant: .*never"),
        ("{{ messages[0].content.__class__.__mro__ }}", "SecurityError"),
        ("  ", "renders nothing"),
        ("{{ bos_token }}Hello.", "not the text"),
    ],
)
def test_a_broken_template_is_refused_with_its_file(
    tmp_path: Path, template: str, what: str
) -> None:
    copy_model(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(UserError, match=rf"tokenizer_config.json .*{what}"):
        ChatFormat.load(tmp_path)


def test_too_many_messages_are_refused_at_once(chat: ChatFormat) -> None:
    with pytest.raises(InvalidFieldError, match="10001 messages; at most 10000"):
        chat.encode_messages([{"role": "user", "content": "x"}] * 10_001)


def test_tags_that_a_tokenizer_calls_ordinary_are_tags_here(tmp_path: Path) -> None:
    layout = json.loads((MODEL / "tokenizer.json").read_text())
    for token in layout["added_tokens"]:
        token["special"] = False
    copy_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    assert ChatFormat.load(tmp_path).end_id not in ChatFormat.load(tmp_path).encode_text(END)


def test_keys_without_a_value_are_as_if_they_were_not_there(chat: ChatFormat) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    padded = [{**each, "tool_calls": None, "name": None} for each in messages]
    assert chat.encode_messages(padded) == chat.encode_messages(messages)


@pytest.mark.parametrize("message", ["hi", {"role": [], "content": "x"}, {"role": "user"}])
def test_what_is_no_message_is_refused_by_its_place(chat: ChatFormat, message: object) -> None:
    with pytest.raises(InvalidFieldError, match=r"messages\[0\]"):
        chat.encode_messages([message])  # type: ignore[list-item]  # hostile


def test_a_turn_that_another_token_ended_keeps_the_end_of_the_template(tmp_path: Path) -> None:
    copy_model(tmp_path, generation_config={"eos_token_id": [0, 5]})
    chat = ChatFormat.load(tmp_path)
    deltas = []
    for end in (chat.end_id, 5):
        conversation = chat.open("S", "I")
        conversation.add_completion("text", end=end)
        deltas.append(conversation.append_results(["R"]))
    assert deltas[1] == [chat.end_id, *deltas[0]]
