"""The generated model folder is one that transformers reads as we meant it."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from etude.agent.chat import ChatFormat
from etude.demo import generate
from etude.demo.generate import Sizes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "demo"
    generate.generate(folder, seed=3, sizes=Sizes(train=1, held_out=1, traces=300, repositories=1))
    return folder


def test_transformers_reads_the_configuration_of_the_recipe(made: Path) -> None:
    config = AutoConfig.from_pretrained(made / "model")
    expected = {
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.rope_parameters["rope_theta"] == 10_000


def test_transformers_tokenises_a_transcript_as_the_harness_does(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token == "<|pad|>"
    assert len(tokenizer) == 1024
    chat = ChatFormat.load(made / "model")
    for line in (made / "data/traces.jsonl").read_text().splitlines()[:30]:
        messages = json.loads(line)["messages"]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids == chat.encode_messages(messages).token_ids
        assert tokenizer.decode(ids) == chat.decode(ids)
