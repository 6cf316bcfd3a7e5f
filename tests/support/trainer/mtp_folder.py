"""A folder of a small Qwen2 model with a head of multi-token prediction."""

from pathlib import Path

from transformers import Qwen2Config


def write_mtp_config(folder: Path, **fields: object) -> Path:
    """Write the configuration alone: weights are drawn."""
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
    }
    Qwen2Config(**(settings | fields)).save_pretrained(folder)
    return folder
