"""`etude serve` answers an unchanged openai client from a Hugging Face folder."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

START_LIMIT_S = 240

CALL = ("<tool_call>", "<function=read_file>", "<parameter=path>", "a", "</parameter>")
SCRIPT = ("<|assistant|>", *CALL, "</function>", "</tool_call>", "<|end|>")
"""What the policy says after the start of its turn, token by token."""

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]
ASK: Any = [{"role": "user", "content": "Fix it."}]


def scripted(folder: Path) -> None:
    """Give the folder weights that always continue the script, whatever came before.

    Each token of the script has an embedding axis of its own, attention adds nothing, and the
    first layer's MLP looks up the axis of the next token.
    """
    config = AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in SCRIPT]
    assert None not in ids
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, : len(ids)] = 0
        for axis, token_id in enumerate(ids):
            embedding[token_id] = torch.nn.functional.one_hot(torch.tensor(axis), 64) * 8.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        lookup = model.model.layers[0].mlp
        lookup.gate_proj.weight.zero_()
        lookup.up_proj.weight.zero_()
        for axis in range(len(ids) - 1):
            lookup.gate_proj.weight[axis, axis] = 1.0
            lookup.up_proj.weight[axis, axis] = 1.0
            lookup.down_proj.weight[axis + 1, axis] = 2.0
    model.save_pretrained(folder)


@dataclass
class Served:
    process: "subprocess.Popen[str]"
    url: str


@pytest.fixture(scope="module")
def served(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = make_model(tmp_path_factory.mktemp("serve") / "tiny", dtype="bfloat16")
    scripted(folder)
    words = ["-m", "etude.inference.serve_command", "--model", str(folder), "--port", "0"]
    with (folder.parent / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words, "--kv-cache-mib", "64"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    # Also a start that is cut off by the limit of a test must leave no engine behind.
    try:
        assert process.stdout is not None
        deadline = time.monotonic() + START_LIMIT_S
        line = process.stdout.readline()
        while line and not line.startswith("serving ") and time.monotonic() < deadline:
            line = process.stdout.readline()
        assert line.startswith("serving tiny at http://"), (folder.parent / "log").read_text()
        yield Served(process, line.split()[-1])
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="unused", max_retries=0, timeout=60)


def arguments(call: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(call.function.arguments)
    return found


def test_the_folders_name_is_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["tiny"]


def test_a_chat_answers_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, temperature=0, max_tokens=20, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    # The tags are special tokens: without tools they are no part of the text.
    assert (choice.message.content, choice.finish_reason) == ("a", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == len(SCRIPT) - 1
    assert all(token.logprob > -0.1 for token in choice.logprobs.content)


def test_a_chat_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, temperature=0, max_tokens=20, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "a"
    assert chunks[-1].finish_reason == "stop"


def test_a_tool_call_is_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, temperature=0, max_tokens=20, tools=TOOLS
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert (call.type, arguments(call)) == ("function", {"path": "a"})


def test_a_tool_call_is_parsed_from_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, temperature=0, max_tokens=20, tools=TOOLS, stream=True
    )
    name, text = "", ""
    for chunk in stream:
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            assert call.function is not None
            name += call.function.name or ""
            text += call.function.arguments or ""
    assert (name, json.loads(text)) == ("read_file", {"path": "a"})


def test_the_result_of_a_tool_goes_back_in(client: openai.OpenAI) -> None:
    function = {"name": "read_file", "arguments": '{"path": "a"}'}
    call = {"id": "c1", "type": "function", "function": function}
    turns = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x = 1"},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=turns, temperature=0, max_tokens=20, tools=TOOLS
    )
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_completion_of_plain_text_has_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="<|assistant|>", temperature=0, max_tokens=20, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == "a"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == len(SCRIPT) - 1


def test_a_prompt_that_does_not_fit_is_refused_with_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="256"):
        client.completions.create(model="tiny", prompt=[20] * 300, max_tokens=1)


def test_a_model_that_is_not_served_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x", max_tokens=1)


def test_only_the_documented_paths_are_served(served: Served) -> None:
    root = served.url.removesuffix("/v1")
    assert httpx.get(f"{root}/health", timeout=60).status_code == 200
    assert httpx.get(f"{root}/openapi.json", timeout=60).status_code == 404
    assert httpx.post(f"{root}/pause", timeout=60).status_code == 404


def test_a_folder_without_a_model_is_refused_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etude.inference.serve_command", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 4
    assert "config.json" in done.stderr


def test_it_ends_in_order_when_told_to(served: Served) -> None:
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
