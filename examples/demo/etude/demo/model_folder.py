"""The demo's model folder: a configuration and a tokenizer, without weights."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from etude.agent.chat import CHAT_TEMPLATE
from etude.demo import tokenizer

CONTEXT = 1024

_CONFIG: Mapping[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": tokenizer.VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000},
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT,
    # 0.05 and not 0.02: with the smaller one a policy of this size learned to copy much later.
    "initializer_range": 0.05,
    "dtype": "float32",
}
"""0.92 M parameters. Written by hand, so that generating tasks needs no torch."""


def write(folder: Path, trained: Tokenizer) -> None:
    """Write config.json, generation_config.json, tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {
        "bos_token_id": None,
        "eos_token_id": trained.token_to_id(tokenizer.END),
        "pad_token_id": trained.token_to_id(tokenizer.PAD),
    }
    trained.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", {**_CONFIG, **ids})
    _write(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 1.0})
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "eos_token": tokenizer.END,
            "pad_token": tokenizer.PAD,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
