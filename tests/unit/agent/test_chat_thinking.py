"""Tokens of thinking are counted by the model's own tags."""

import json
from pathlib import Path

import pytest

from etude.agent.chat import ChatFormat
from etude.agent.chat.thinking import count_thinking, remove_thinking
from etude.agent.local import LocalEnvironment, ScriptedSampler
from etude.agent.rollout import run_rollout
from etude.agent.token_policy import RolloutLimits, RolloutTask
from etude.agent.tool_calls import render_call
from etude.agent.tool_formats.xml import XmlFormat
from etude.agent.toolsets import toolset
from etude.agent.trajectory import Trajectory
from etude.agent.workspace import ExecResult, MemoryWorkspace

MODEL = Path(__file__).parent / "model"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>OPENING{% endif %}"
)


def load(folder: Path, opening: str, *, is_token: bool, template: str = TEMPLATE) -> ChatFormat:
    """The model with a template that knows thinking, and perhaps its tags as tokens."""
    layout = json.loads((MODEL / "tokenizer.json").read_text())
    if is_token:
        size = len(layout["model"]["vocab"])
        layout["added_tokens"] += [
            {**layout["added_tokens"][0], "id": size + place, "content": tag, "special": False}
            for place, tag in enumerate(("<think>", "</think>"))
        ]
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    (folder / "chat_template.jinja").write_text(template.replace("OPENING", opening))
    return ChatFormat.load(folder)


async def no_shell(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


async def roll_out(chat: ChatFormat, *turns: str) -> Trajectory:
    tools = toolset("Compact")
    return await run_rollout(
        ScriptedSampler(chat, iter(turns)),
        LocalEnvironment(tools, MemoryWorkspace({"a.py": b"x = 1\n"}, no_shell)),
        chat,
        tools,
        RolloutLimits(max_turns=8, max_turn_tokens=400, max_tokens=40_000, timeout_s=60),
        RolloutTask(instruction="Fix it."),
    )


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
    is_open = chat.open("S", "I").opens_thinking
    assert count_thinking(chat, first + last, is_open=is_open) == len(first)


def test_a_model_without_tags_of_thinking_does_not_think(chat: ChatFormat) -> None:
    ids = chat.completion("<think>x</think>")
    assert count_thinking(chat, ids, is_open=chat.open("S", "I").opens_thinking) == 0


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
    chat = load(tmp_path, opening, is_token=True)
    is_open = chat.open("S", "I").opens_thinking
    assert remove_thinking(chat, text, XmlFormat(), is_open=is_open) == rest


def test_tags_inside_of_a_call_stay_as_they_are(tmp_path: Path) -> None:
    chat = load(tmp_path, "", is_token=True)
    for content in ("a<think>b</think>c", "never <think>closed"):
        call = render_call("write_file", {"path": "a.md", "content": content})
        thought = "<think>perhaps " + render_call("read_file", {"path": "a.md"}) + "</think>"
        text = f"{thought}Now. {call}"
        assert remove_thinking(chat, text, XmlFormat(), is_open=False) == f"Now. {call}"


def test_a_model_without_tags_of_thinking_keeps_its_text(chat: ChatFormat) -> None:
    text = "<think>x</think>"
    assert remove_thinking(chat, text, XmlFormat(), is_open=False) == text


FIRST_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{{ '<think>\n' if messages[-1].role == 'user' }}{% endif %}"
)
"""Thinking opens after the user's messages, not after results."""


async def test_a_call_after_a_result_is_not_thinking_that_the_template_opened(
    tmp_path: Path,
) -> None:
    chat = load(tmp_path, "", is_token=True, template=FIRST_ONLY)
    call = render_call("read_file", {"path": "a.py"})
    done = await roll_out(chat, f"why</think>{call}", call, f"<think>so</think>{call}", "Done.")
    assert [record.name for record in done.calls] == ["read_file"] * 3
    assert done.final_message == "Done."
    first, third = chat.completion("why</think>")[:-1], chat.completion("<think>so</think>")[:-1]
    assert done.costs.thinking_tokens == len(first) + len(third)
    (link,) = done.links
    result = "<|end|><|tool|>x = 1<|end|><|assistant|>"
    assert chat.decode(link.token_ids).endswith(
        f"<|user|>Fix it.<|end|><|assistant|><think>\nwhy</think>{call}{result}{call}{result}"
        f"<think>so</think>{call}{result}Done.<|end|>"
    )


async def test_thinking_is_open_in_a_new_link_as_its_prompt_says(tmp_path: Path) -> None:
    refused = (
        "{% if messages | length > 3 and '\ufdd0' in messages[2].content %}"
        "{{ raise_exception('not so') }}{% endif %}"
    )
    chat = load(tmp_path, "", is_token=True, template=refused + FIRST_ONLY)
    call = render_call("read_file", {"path": "a.py"})
    done = await roll_out(chat, f"why</think>{call}", call, "Done.")
    assert len(done.links) == 2
    assert [record.name for record in done.calls] == ["read_file"] * 2
