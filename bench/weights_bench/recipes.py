"""What each trajectory is made of: sizes, lengths, rates. Equal recipes give equal words."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Trajectory A: sizes of the model."""

    vocabulary: int = 24_576
    hidden: int = 1_024
    intermediate: int = 3_072
    key_value: int = 512
    layers: int = 6

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, as in a checkpoint."""
        hidden, wide, narrow = self.hidden, self.intermediate, self.key_value
        yield "model.embed_tokens.weight", (self.vocabulary, hidden)
        yield "model.norm.weight", (hidden,)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (hidden,)
            yield f"{at}.post_attention_layernorm.weight", (hidden,)
            yield f"{at}.self_attn.q_proj.weight", (hidden, hidden)
            yield f"{at}.self_attn.k_proj.weight", (narrow, hidden)
            yield f"{at}.self_attn.v_proj.weight", (narrow, hidden)
            yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
            yield f"{at}.mlp.gate_proj.weight", (wide, hidden)
            yield f"{at}.mlp.up_proj.weight", (wide, hidden)
            yield f"{at}.mlp.down_proj.weight", (hidden, wide)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforced:
    """Trajectory B: the model and how long it learns. B rows of T bytes, width D."""

    width: int = 384
    layers: int = 6
    heads: int = 6
    inner: int = 1_024
    context: int = 128
    rows: int = 16
    pretraining_steps: int = 300
    pretraining_rate: float = 1e-3
    steps: int = 100
    rate: float = 1e-6
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPolicy:
    """Trajectory C: how long the policy learns before the step that is looked at."""

    traces: int = 400
    supervised_steps: int = 100
    policy_steps: int = 40
    """All of the demo's: the last two versions are its last two."""
    seed: int = 0
