"""`etude model` as a user types it."""

import json
import os
from pathlib import Path

import pytest
from tests.support.hub_server import Hub, serve_hub
from tests.support.warm_etude import etude
from tokenizers import AddedToken, Tokenizer, models

from etude.common.weights.tensors.safetensors import Tensor, encode

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 8,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    embedding = Tensor(name="embed", dtype="BF16", shape=(8, 4), data=bytes(64))
    norm = Tensor(name="norm", dtype="F32", shape=(4,), data=bytes(16))
    (folder / "model.safetensors").write_bytes(encode([embedding, norm]))
    return folder


def test_inspect_shows_a_folder_in_ten_lines(folder: Path) -> None:
    done = etude("model", "inspect", str(folder))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert "LlamaForCausalLM (llama): 2 layers, 4 wide, 2 heads" in done.stdout
    assert "4 in F32" in done.stdout
    assert "32 in BF16" in done.stdout
    assert "<|im_end|> (2)" in done.stdout
    assert "tied to the output" in done.stdout


def test_inspect_shows_why_a_model_cannot_chat(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    done = etude("model", "inspect", str(folder))
    assert done.returncode == 0
    assert "chat          refused: " in done.stdout
    assert "fix: " in done.stdout
    assert "architecture" in done.stdout


def test_inspect_renders_tools_within_limits(folder: Path) -> None:
    fill = f"{{{{ 'x' * (tools | length * {1 << 31}) }}}}"
    (folder / "chat_template.jinja").write_text(
        f"{{# <tool_call> #}}{{% if (tools or []) | length > 5 %}}{fill}{{% endif %}}{TEMPLATE}"
    )
    done = etude("model", "inspect", str(folder))
    assert done.returncode == 0, done.stderr
    assert "Native: refused: " in done.stdout
    assert "MemoryError" in done.stdout


def test_a_damaged_file_of_weights_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    done = etude("model", "inspect", str(folder))
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["tiny.Q4_1.gguf", "pytorch_model.bin"])
def test_what_is_no_safetensors_is_refused_with_a_fix(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    for verb in ("inspect", "import"):
        done = etude("model", verb, str(folder))
        assert done.returncode == 4
        assert name in done.stderr
        assert "fix: " in done.stderr


def test_a_model_of_a_hub_is_shown_and_imported(folder: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serve_hub(Hub("org/tiny", files, frozenset({"model.safetensors"}))) as hub:
        env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "XDG_CACHE_HOME": str(tmp_path / "c")}
        shown = etude("model", "inspect", "hf://org/tiny", env=env)
        assert shown.returncode == 0, shown.stderr
        assert f"hf://org/tiny@{hub.commit}" in shown.stdout
        done = etude("model", "import", "hf://org/tiny", "--to", tmp_path.as_uri(), env=env)
        assert done.returncode == 0, done.stderr
        copied = Path(done.stdout.strip().removeprefix("file://"))
        assert {path.name: path.read_bytes() for path in copied.iterdir()} == files
        absent = etude("model", "inspect", "hf://org/absent", env=env)
        assert absent.returncode == 3
        assert "fix: " in absent.stderr
