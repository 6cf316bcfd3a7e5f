"""The warm-up has two habits in minorities, and its template shows the tools of clients."""

import json
from pathlib import Path
from random import Random

import pytest

from etude.agent import tool_calls, toolsets
from etude.agent.chat import ChatFormat, Message
from etude.agent.chat.native_form import find_native_form
from etude.demo.generate import Sizes
from etude.demo.realtime.inputs import add_habits, write_inputs

COMPACT = toolsets.toolset("Compact")
TRACES = 300


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("realtime") / "inputs"
    write_inputs(folder, seed=0, sizes=Sizes(train=2, held_out=2, traces=TRACES, repositories=2))
    return folder


def test_questions_and_broken_calls_are_minorities(inputs: Path) -> None:
    lines = (inputs / "data" / "traces.jsonl").read_text().splitlines()
    transcripts = [json.loads(line)["messages"] for line in lines]
    asking = sum(
        any(m["role"] == "assistant" and m["content"].endswith("?") for m in each)
        for each in transcripts
    )
    broken = sum(
        any(isinstance(c, tool_calls.MalformedCall) for c in calls)
        for each in transcripts
        if (calls := tool_calls.parse_calls(each[-1]["content"]).calls)
    )
    assert len(transcripts) == TRACES
    assert 0.03 < asking / TRACES < 0.15
    assert 0.02 < broken / TRACES < 0.12


def test_a_request_with_tools_becomes_the_prompt_of_the_transcripts(inputs: Path) -> None:
    chat = ChatFormat.load(inputs / "model")
    form = find_native_form(chat, COMPACT.schemas())
    shown = chat.open(COMPACT.native_prompt, "Fix add_coin.", form.shown).prompt
    assert shown == chat.open(COMPACT.system_prompt, "Fix add_coin.").prompt


def test_a_transcript_without_calls_is_never_cut() -> None:
    messages: list[Message] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "Done."},
    ]
    for seed in range(200):
        assert add_habits(messages, Random(seed))[-1] == messages[-1]
