"""A chat endpoint that renders our template gives the harness's tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.support.chat_tokens import encode_opening

from etude.agent import tool_calls
from etude.agent.chat import CHAT_TEMPLATE, ChatFormat

MODEL = Path(__file__).parents[1] / "unit" / "agent" / "model"
CALL = tool_calls.render_call("read_file", {"path": "a.py"}) + tool_calls.render_call(
    "grep", {"pattern": "\nx"}
)


def rendered(messages: list[dict[str, Any]], *, prompt: bool) -> str:
    """The template in the environment that transformers and vLLM render it in."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(CHAT_TEMPLATE)
    return template.render(messages=messages, add_generation_prompt=prompt)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat.load(MODEL)


def tokens(chat: ChatFormat, text: str) -> list[int]:
    """What a chat endpoint sends to the engine: the text with its tags read as tags."""
    return chat.completion(text)[:-1]


def test_the_first_prompt_is_the_same(chat: ChatFormat) -> None:
    messages = [
        {"role": "system", "content": " Fix the bug.\n"},
        {"role": "user", "content": "é {{ x }} {% raw %}\n\n"},
    ]
    expected = encode_opening(chat, " Fix the bug.\n", "é {{ x }} {% raw %}\n\n")
    assert tokens(chat, rendered(messages, prompt=True)) == expected


@pytest.mark.parametrize(
    "results",
    [
        [{"role": "tool", "content": ["one\n", ""]}],
        [{"role": "tool", "content": "one\n"}, {"role": "tool", "content": ""}],
        [
            {"role": "tool", "content": [{"type": "text", "text": "one\n"}]},
            {"role": "tool", "content": [{"type": "text", "text": ""}]},
        ],
    ],
    ids=["ours", "one message per call", "content parts"],
)
def test_a_whole_transcript_is_the_same(chat: ChatFormat, results: list[dict[str, Any]]) -> None:
    head = [{"role": "system", "content": "S"}, {"role": "user", "content": "I"}]
    head += [{"role": "assistant", "content": CALL}]
    last = {"role": "assistant", "content": "Done."}
    text = rendered([*head, *results, last], prompt=False)
    ours = chat.encode_messages([*head, {"role": "tool", "content": ["one\n", ""]}, last])  # type: ignore[list-item] # plain dicts, as they come from a file
    assert tokens(chat, text) == ours.token_ids


def test_structured_tool_calls_render_as_the_policy_writes_them() -> None:
    structured = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "read_file", "arguments": {"path": "a.py"}}},
            {"type": "function", "function": {"name": "grep", "arguments": {"pattern": "\nx"}}},
        ],
    }
    assert rendered([structured], prompt=False) == f"<|assistant|>{CALL}<|end|>"


def test_transformers_renders_and_encodes_the_same(tmp_path: Path, chat: ChatFormat) -> None:
    transformers = pytest.importorskip("transformers")
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    config["chat_template"] = CHAT_TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "I x\n  y"}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(ids) == encode_opening(chat, "S", "I x\n  y")
