"""Encoder as torch trains it; numpy runs it in whole numbers (`embedders.transformer`)."""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from etude.agent.search.embedders.transformer import MAX_GATE
from etude.agent.search.embedders.weights import (
    HEADS,
    EncoderWeights,
    Layer,
    Linear,
    quantise_rows,
)
from etude.agent.search.embedders.word_rows import MAX_WORDS


class Batch(NamedTuple):
    """Texts as rows of words, padded."""

    ids: Tensor
    """[B, L]."""
    weights: Tensor
    """Weight of each word by its count, 0 for padding.  [B, L]."""


class EncoderLayer(nn.Module):
    """Attention and two linear maps, both added to what they read."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, width)
        for last in (self.output, self.outer):  # the first encoder is the sum of its words
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    @override
    def forward(self, x: Tensor, where: Tensor, mask: Tensor) -> Tensor:
        """The sum of x and what the layer makes of it.  [B, L, C] -> [B, L, C]."""
        batch, length, width = x.shape
        split = self.attention(normalise(x + where)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        heads = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.output(heads.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.outer(functional.relu(self.inner(normalise(x + where))))
        return x + added


class Encoder(nn.Module):
    """Words to vectors."""

    def __init__(self, rows: Tensor, num_layers: int, inner: int) -> None:
        super().__init__()
        width = rows.shape[1]
        self.rows = nn.Parameter(rows)
        self.places = nn.Parameter(torch.zeros(MAX_WORDS, width))
        self.kinds = nn.Parameter(torch.zeros(2, width))
        self.gate = nn.Linear(width, 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.layers = nn.ModuleList(EncoderLayer(width, inner) for _ in range(num_layers))

    @override
    def forward(self, batch: Batch, kind: int, num_layers: int) -> Tensor:
        """Vectors of length 1, from the first layers.  [B, L] -> [B, C]."""
        x = functional.embedding(batch.ids, self.rows)
        where = self.places[: x.shape[1]] + self.kinds[kind]
        mask = batch.weights > 0
        mask[:, 0] = True  # attention to nothing is no number
        for layer in self.layers[:num_layers]:
            x = layer(x, where, mask[:, None, None, :])
        gates = (1 + self.gate(normalise(x + where))[:, :, 0]).clamp(0, MAX_GATE)
        sums = torch.einsum("bl,blc->bc", gates * batch.weights, x)
        return functional.normalize(sums, dim=1)

    def rescale(self, factor: float) -> None:
        """Multiply all that is added up, which changes no vector while no layer adds anything."""
        with torch.no_grad():
            for each in (self.rows, self.places, self.kinds):
                each.mul_(factor)

    def quantise(self, words: list[str]) -> EncoderWeights:
        """The nearest encoder of whole numbers."""
        rows, scales, unit = quantise_rows(_floats(self.rows))
        return EncoderWeights(
            words=words,
            rows=rows,
            scales=scales,
            unit=unit,
            places=_floats(self.places),
            kinds=_floats(self.kinds),
            gate=_linear(self.gate),
            layers=[
                Layer(*map(_linear, (layer.attention, layer.output, layer.inner, layer.outer)))
                for layer in self.layers
                if isinstance(layer, EncoderLayer)
            ],
        )


def normalise(x: Tensor) -> Tensor:
    """Scale to a mean square of 1.  [..., C]."""
    return functional.normalize(x, dim=-1) * math.sqrt(x.shape[-1])


def _linear(layer: nn.Linear) -> Linear:
    return Linear.quantise(_floats(layer.weight), _floats(layer.bias))


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.detach().numpy().astype(np.float32)
    return found
