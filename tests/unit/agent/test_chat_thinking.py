"""Tokens of thinking are counted by the model's own tags."""

import json
from pathlib import Path

import pytest

from etude.agent.chat import ChatFormat
from etude.agent.chat.thinking import count_thinking, remove_thinking
from etude.agent.tool_calls import render_call
from etude.agent.tool_formats.xml import XmlFormat

MODEL = Path(__file__).parent / "model"
TEMPLATE = (
    "{%% for m in messages %%}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{%% endfor %%}{%% if add_generation_prompt %%}<|assistant|>%s{%% endif %%}"
)


def load(folder: Path, opening: str, *, is_token: bool) -> ChatFormat:
    """The model with a template that knows thinking, and perhaps its tags as tokens."""
    layout = json.loads((MODEL / "tokenizer.json").read_text())
    if is_token:
        size = len(layout["model"]["vocab"])
        layout["added_tokens"] += [
            {**layout["added_tokens"][0], "id": size + place, "content": tag, "special": False}
            for place, tag in enumerate(("<think>", "</think>"))
        ]
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    (folder / "chat_template.jinja").write_text(TEMPLATE % opening)
    return ChatFormat.load(folder)


@pytest.mark.parametrize("is_token", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("opening", "thought", "rest"),
    [
        ("", "<think>why not</think>", "Done."),
        ("<think>", "why not</think>", "Done."),
        ("<think>", "never closed", ""),
        ("", "", "Done."),
        ("<think></think>", "", "Done."),
    ],
)
def test_thinking_is_counted_with_its_tags(
    tmp_path: Path, opening: str, thought: str, rest: str, *, is_token: bool
) -> None:
    chat = load(tmp_path, opening, is_token=is_token)
    first, last = chat.vocabulary.encode_tagged(thought), chat.vocabulary.encode_tagged(rest)
    assert count_thinking(chat, first + last) == len(first)


def test_a_model_without_tags_of_thinking_does_not_think(chat: ChatFormat) -> None:
    assert count_thinking(chat, chat.completion("<think>x</think>")) == 0


@pytest.mark.parametrize(
    ("opening", "text", "rest"),
    [
        ("", "<think>a call?</think>Done.", "Done."),
        ("", "First.<think>a</think>Then.<think>b</think>", "First.Then."),
        ("<think>", "a call?</think>Done.", "Done."),
        ("<think>", "never closed", ""),
        ("", "<think>never closed", ""),
        ("", "Done.", "Done."),
    ],
)
def test_calls_are_looked_for_outside_of_thinking(
    tmp_path: Path, opening: str, text: str, rest: str
) -> None:
    assert remove_thinking(load(tmp_path, opening, is_token=True), text, XmlFormat()) == rest


def test_tags_inside_of_a_call_stay_as_they_are(tmp_path: Path) -> None:
    chat = load(tmp_path, "", is_token=True)
    for content in ("a<think>b</think>c", "never <think>closed"):
        call = render_call("write_file", {"path": "a.md", "content": content})
        thought = "<think>perhaps " + render_call("read_file", {"path": "a.md"}) + "</think>"
        assert remove_thinking(chat, f"{thought}Now. {call}", XmlFormat()) == f"Now. {call}"


def test_a_model_without_tags_of_thinking_keeps_its_text(chat: ChatFormat) -> None:
    assert remove_thinking(chat, "<think>x</think>", XmlFormat()) == "<think>x</think>"
