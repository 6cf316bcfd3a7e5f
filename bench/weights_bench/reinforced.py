"""Trajectory B: a byte transformer under real policy gradients.

It is pre-trained on the source of Python's standard library, cast to bf16, and then reinforced: in
every context one byte is sampled, the reward is 1 for the true next byte, advantages are
standardised over the batch. AdamW on fp32 masters; the last two bf16 versions are the trajectory.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from etude.common.weights.tensors.words import Words
from weights_bench.recipes import Reinforced
from weights_bench.trajectory import Trajectory, gathered, spec


class _Layer(nn.Module):
    """Attention and a gated feed-forward, both on normed input."""

    def __init__(self, recipe: Reinforced) -> None:
        super().__init__()
        self.heads = recipe.heads
        self.input_layernorm = nn.RMSNorm(recipe.width)
        self.post_attention_layernorm = nn.RMSNorm(recipe.width)
        self.q_proj = nn.Linear(recipe.width, recipe.width, bias=False)
        self.k_proj = nn.Linear(recipe.width, recipe.width, bias=False)
        self.v_proj = nn.Linear(recipe.width, recipe.width, bias=False)
        self.o_proj = nn.Linear(recipe.width, recipe.width, bias=False)
        self.gate_proj = nn.Linear(recipe.width, recipe.inner, bias=False)
        self.up_proj = nn.Linear(recipe.width, recipe.inner, bias=False)
        self.down_proj = nn.Linear(recipe.inner, recipe.width, bias=False)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        normed = self.input_layernorm(hidden)
        query, key, value = (
            each(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(-2))
        normed = self.post_attention_layernorm(hidden)
        inner = functional.silu(self.gate_proj(normed)) * self.up_proj(normed)
        fed: Tensor = hidden + self.down_proj(inner)
        return fed


class _ByteModel(nn.Module):
    """Log-probs of the next byte."""

    def __init__(self, recipe: Reinforced) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(256, recipe.width)
        self.positions = nn.Embedding(recipe.context, recipe.width)
        self.layers = nn.ModuleList(_Layer(recipe) for _ in range(recipe.layers))
        self.norm = nn.RMSNorm(recipe.width)
        self.lm_head = nn.Linear(recipe.width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    @override
    def forward(self, text: Tensor) -> Tensor:
        """[B, T] -> [B, T, 256]."""
        hidden = self.embed_tokens(text) + self.positions.weight[: text.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.lm_head(self.norm(hidden)).log_softmax(dim=-1)
        return scores


def trajectory(recipe: Reinforced) -> Trajectory:
    """The last two versions of the reinforced model."""
    torch.manual_seed(recipe.seed)
    batches = _Batches(recipe)
    model = _ByteModel(recipe)
    loss = _train(model, batches, _imitation, recipe.pretraining_steps, recipe.pretraining_rate)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.999))
    old = new = _words(model)
    for _ in range(recipe.steps):
        old = new
        _step(model, optimiser, batches, _reinforcement)
        new = _words(model)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    tensors = {
        name: (spec(name, "BF16", shape), old[name], new[name]) for name, shape in shapes.items()
    }
    return gathered("B", tensors, {**asdict(recipe), "pretraining_loss": round(loss, 4)})


_Loss = Callable[[Tensor, Tensor], Tensor]


def _train(model: nn.Module, batches: "_Batches", loss: _Loss, steps: int, rate: float) -> float:
    """Warmed up over a tenth of the steps, then decayed to zero; the mean of the last losses."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    warm = max(1, steps // 10)
    losses = []
    for step in range(steps):
        share = min((step + 1) / warm, (steps - step) / max(1, steps - warm))
        for group in optimiser.param_groups:
            group["lr"] = rate * share
        losses.append(_step(model, optimiser, batches, loss))
    return float(np.mean(losses[-20:])) if losses else float("nan")


def _step(
    model: nn.Module, optimiser: torch.optim.Optimizer, batches: "_Batches", loss: _Loss
) -> float:
    text, following = batches.draw()
    found = loss(model(text), following)
    optimiser.zero_grad()
    torch.autograd.backward(found)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return float(found.detach())


def _imitation(scores: Tensor, following: Tensor) -> Tensor:
    return -scores.gather(-1, following[..., None]).mean()


def _reinforcement(scores: Tensor, following: Tensor) -> Tensor:
    """REINFORCE over single bytes."""
    sampled = torch.multinomial(scores.detach().exp().flatten(0, 1), 1).view(following.shape)
    rewards = (sampled == following).float()
    advantages = (rewards - rewards.mean()) / rewards.std().clamp_min(1e-6)
    chosen = scores.gather(-1, sampled[..., None])[..., 0]
    return -(advantages * chosen).mean()


class _Batches:
    """Random stretches of the standard library's source."""

    def __init__(self, recipe: Reinforced) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._rows, self._context = recipe.rows, recipe.context
        self._random = torch.Generator().manual_seed(recipe.seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Bytes and those that follow each of them. [B, T], [B, T]."""
        last = len(self._text) - self._context - 1
        starts = torch.randint(last, (self._rows, 1), generator=self._random)
        text = self._text[starts + torch.arange(self._context + 1)].long()
        return text[:, :-1], text[:, 1:]


def _words(model: nn.Module) -> dict[str, Words]:
    """What would be published now."""
    with torch.no_grad():
        return {
            name: parameter.bfloat16().view(torch.uint16).flatten().numpy()
            for name, parameter in model.named_parameters()
        }
