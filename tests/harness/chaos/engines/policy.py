"""The real engines' policy: a small Qwen3 with Adam-like steps; numpy alone, none of our code."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.harness.chaos.model import Bits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY, HIDDEN, INNER, LAYERS = 320, 128, 256, 3
HEADS, KV_HEADS, HEAD = 4, 2, 32
CONTEXT = 256

RATES = (1e-6, 3e-4)
"""Adam's learning rate is drawn from here at each step: 0.3 to 60 % of the elements change."""

Fused = tuple[tuple[str, int], ...]
"""Names in a layer and rows of what an engine keeps in one parameter."""

FUSED: Mapping[str, Fused] = {
    "self_attn.qkv_proj.weight": (
        ("self_attn.q_proj.weight", HEADS * HEAD),
        ("self_attn.k_proj.weight", KV_HEADS * HEAD),
        ("self_attn.v_proj.weight", KV_HEADS * HEAD),
    ),
    "mlp.gate_up_proj.weight": (("mlp.gate_proj.weight", INNER), ("mlp.up_proj.weight", INNER)),
}


def _layer() -> dict[str, tuple[int, ...]]:
    return {
        **{name: (rows, HIDDEN) for parts in FUSED.values() for name, rows in parts},
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "self_attn.k_norm.weight": (HEAD,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "self_attn.q_norm.weight": (HEAD,),
    }


SHAPES: Mapping[str, tuple[int, ...]] = dict(
    sorted(
        {
            "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
            "model.norm.weight": (HIDDEN,),
            **{
                f"model.layers.{number}.{name}": shape
                for number in range(LAYERS)
                for name, shape in _layer().items()
            },
        }.items()
    )
)
"""The checkpoint's tensors, sorted by name as its bytes are; the embedding is the head, too."""

_SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
TOTAL = sum(_SIZES.values())


def write_model(folder: Path) -> Path:
    """A configuration and a byte-level tokenizer; no weights: versions bring them."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def sha256(bits: Mapping[str, npt.NDArray[np.integer]]) -> str:
    """SHA-256 of the full bytes in checkpoint order, hexadecimal."""
    found = hashlib.sha256()
    for name in SHAPES:
        found.update(np.ascontiguousarray(bits[name]).view(np.uint8).data)
    return found.hexdigest()


def state(bits: Mapping[str, npt.NDArray[np.integer]]) -> str:
    """The state digest, as its formula reads: two sums mod 2^64 over all words."""
    words = np.concatenate([bits[name].reshape(-1).view(np.uint16) for name in SHAPES])
    sums = []
    for start in (0, 0xA5A5A5A5A5A5A5A5):
        mixed = np.arange(words.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += words.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.uint64(start)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        sums.append(int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64)))
    return "".join(f"{each:016x}" for each in sums)


@dataclass(slots=True)
class Trainer:
    """Full-precision masters that Adam moves; the same branch and step give the same bits."""

    seed: int
    branch: int = 0
    """Rises where a run goes another way than before."""
    step: int = 0
    master: npt.NDArray[np.float32] = field(init=False)
    mean: npt.NDArray[np.float32] = field(init=False)
    spread: npt.NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        drawn = np.random.default_rng(self.seed)
        parts = [
            np.full(size, 1.0, np.float32) + drawn.standard_normal(size, np.float32) * 0.05
            if "norm" in name
            else drawn.standard_normal(size, np.float32) * np.float32(0.06)
            for name, size in _SIZES.items()
        ]
        self.master = np.concatenate(parts).astype(np.float32)
        self.mean = np.zeros(TOTAL, np.float32)
        self.spread = np.zeros(TOTAL, np.float32)

    def train(self) -> None:
        """Take one step of Adam along a random gradient."""
        self.step += 1
        drawn = np.random.default_rng([self.seed, self.branch, self.step])
        gradient = drawn.standard_normal(TOTAL, np.float32)
        self.mean += np.float32(0.1) * (gradient - self.mean)
        self.spread += np.float32(0.05) * (gradient * gradient - self.spread)
        rate = np.float32(np.exp(drawn.uniform(*np.log(RATES))))
        self.master -= rate * self.mean / (np.sqrt(self.spread) + np.float32(1e-8))

    def bits(self) -> Bits:
        """The weights as they are published: to the nearest bfloat16, ties to even."""
        words = self.master.view(np.uint32)
        rounded = (words + np.uint32(0x7FFF) + ((words >> 16) & 1)) >> 16
        found, start = {}, 0
        for name, size in _SIZES.items():
            found[name] = rounded[start : start + size].astype(np.uint16)
            start += size
        return found

    def save(self, path: Path) -> None:
        """Write everything that a resumed trainer needs."""
        place = np.array([self.branch, self.step])
        with path.open("wb") as file:
            np.savez(file, master=self.master, mean=self.mean, spread=self.spread, place=place)

    def load(self, path: Path) -> None:
        """Go on from what was saved."""
        with np.load(path) as saved:
            self.master, self.mean = saved["master"], saved["mean"]
            self.spread = saved["spread"]
            self.branch, self.step = (int(each) for each in saved["place"])
